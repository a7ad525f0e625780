"""What an earlier process compiled of a model's graphs, taken up where it left them."""
