"""Small programs as users write them: layers, losses, mutation, aliases, odd dtypes and sizes."""
