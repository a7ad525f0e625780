"""Layers of torch.nn: a module and its arguments, by name. Each is run forward and, where it can be, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tests.frontend.check import randn

Made = tuple[nn.Module, tuple[object, ...]]


class Whole(nn.Module):
    """A function of modules and arguments as one module."""

    def __init__(self, fn: Callable[..., object], *parts: nn.Module):
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, *args: object) -> object:
        return self.fn(*self.parts, *args)


def image(*shape: int) -> torch.Tensor:
    return randn(*(shape or (2, 3, 8, 8)))


def padded() -> torch.Tensor:
    return torch.tensor([[False, False, False, False, True], [False, False, False, True, True]])


LAYERS: Mapping[str, Callable[[], Made]] = {
    "linear": lambda: (nn.Linear(6, 4), (randn(3, 6),)),
    "linear without bias": lambda: (nn.Linear(6, 4, bias=False), (randn(2, 3, 6),)),
    "linear of a vector": lambda: (nn.Linear(6, 4), (randn(6),)),
    "bilinear": lambda: (nn.Bilinear(3, 4, 2), (randn(5, 3), randn(5, 4))),
    "identity": lambda: (nn.Identity(), (randn(3),)),
    "conv1d": lambda: (nn.Conv1d(3, 4, 3, padding=1), (randn(2, 3, 9),)),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3), (image(),)),
    "conv2d strided": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1), (image(),)),
    "conv2d dilated": lambda: (nn.Conv2d(3, 4, 3, dilation=2), (image(),)),
    "conv2d grouped": lambda: (nn.Conv2d(4, 4, 3, groups=4), (image(2, 4, 6, 6),)),
    "conv2d reflected": lambda: (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (image(),)),
    "conv2d circular": lambda: (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (image(),)),
    "conv2d same": lambda: (nn.Conv2d(3, 4, 3, padding="same"), (image(),)),
    "conv2d of one image": lambda: (nn.Conv2d(3, 4, 3), (randn(3, 8, 8),)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2), (randn(1, 2, 4, 4, 4),)),
    "transposed conv1d": lambda: (nn.ConvTranspose1d(3, 2, 3, stride=2), (randn(1, 3, 5),)),
    "transposed conv2d": lambda: (nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), (image(),)),
    "channels last": lambda: (
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        (image().to(memory_format=torch.channels_last),),
    ),
    "conv, norm and activation": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        (image(),),
    ),
    "batch norm 1d": lambda: (nn.BatchNorm1d(4), (randn(6, 4),)),
    "batch norm 1d of rows": lambda: (nn.BatchNorm1d(4), (randn(3, 4, 5),)),
    "batch norm 2d": lambda: (nn.BatchNorm2d(3), (image(),)),
    "batch norm 3d": lambda: (nn.BatchNorm3d(2), (randn(2, 2, 3, 3, 3),)),
    "batch norm without statistics": lambda: (nn.BatchNorm2d(3, track_running_stats=False), (image(),)),
    "batch norm without weights": lambda: (nn.BatchNorm2d(3, affine=False), (image(),)),
    "batch norm with a plain mean": lambda: (nn.BatchNorm2d(3, momentum=None), (image(),)),
    "group norm": lambda: (nn.GroupNorm(2, 4), (image(2, 4, 3, 3),)),
    "instance norm 1d": lambda: (nn.InstanceNorm1d(3), (randn(2, 3, 7),)),
    "instance norm 2d": lambda: (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (image(),)),
    "layer norm": lambda: (nn.LayerNorm(6), (randn(3, 6),)),
    "layer norm of two axes": lambda: (nn.LayerNorm((3, 4)), (randn(2, 3, 4),)),
    "layer norm in bf16": lambda: (nn.LayerNorm(8).bfloat16(), (randn(3, 8, dtype=torch.bfloat16),)),
    "rms norm": lambda: (nn.RMSNorm(6), (randn(3, 6),)),
    "local response norm": lambda: (nn.LocalResponseNorm(2), (image(),)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (randn(2, 4),)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (randn(2, 4),)),
    "max pool 1d": lambda: (nn.MaxPool1d(2), (randn(2, 3, 8),)),
    "max pool 2d": lambda: (nn.MaxPool2d(3, stride=2, padding=1), (image(),)),
    "max pool with places": lambda: (nn.MaxPool2d(2, return_indices=True), (image(),)),
    "max unpool": lambda: (
        Whole(lambda down, up, x: up(*down(x)), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)),
        (image(),),
    ),
    "average pool 1d": lambda: (nn.AvgPool1d(3, stride=2), (randn(2, 3, 9),)),
    "average pool 2d": lambda: (nn.AvgPool2d(2, ceil_mode=True), (image(1, 2, 7, 7),)),
    "average pool of the inside": lambda: (nn.AvgPool2d(3, padding=1, count_include_pad=False), (image(),)),
    "power pool": lambda: (nn.LPPool2d(2, 2), (image().abs(),)),
    "adaptive average pool": lambda: (nn.AdaptiveAvgPool2d((3, 2)), (image(),)),
    "global average pool": lambda: (nn.AdaptiveAvgPool2d(1), (image(),)),
    "adaptive max pool": lambda: (nn.AdaptiveMaxPool2d(2), (image(),)),
    "upsample nearest": lambda: (nn.Upsample(scale_factor=2), (image(),)),
    "upsample bilinear": lambda: (nn.Upsample(scale_factor=2, mode="bilinear"), (image(),)),
    "upsample bicubic": lambda: (nn.Upsample(size=(5, 7), mode="bicubic", align_corners=True), (image(),)),
    "pixel shuffle": lambda: (nn.PixelShuffle(2), (image(1, 8, 3, 3),)),
    "pixel unshuffle": lambda: (nn.PixelUnshuffle(2), (image(),)),
    "channel shuffle": lambda: (nn.ChannelShuffle(2), (image(1, 4, 3, 3),)),
    "unfold": lambda: (nn.Unfold(3, padding=1), (image(),)),
    "fold": lambda: (nn.Fold((5, 5), 2), (randn(1, 8, 16),)),
    "reflection pad": lambda: (nn.ReflectionPad2d(2), (image(),)),
    "replication pad": lambda: (nn.ReplicationPad1d(2), (randn(1, 3, 5),)),
    "circular pad": lambda: (nn.CircularPad1d(2), (randn(1, 3, 5),)),
    "constant pad": lambda: (nn.ConstantPad2d((1, 2, 0, -1), 3.5), (image(),)),
    "embedding": lambda: (nn.Embedding(7, 4, padding_idx=0), (torch.tensor([[0, 1, 6], [2, 2, 0]]),)),
    "embedding of norm 1": lambda: (nn.Embedding(7, 4, max_norm=1.0), (torch.tensor([0, 1, 6]),)),
    "embedding bag": lambda: (nn.EmbeddingBag(7, 4), (torch.tensor([0, 1, 6, 2]), torch.tensor([0, 3]))),
    "embedding bag of sums": lambda: (nn.EmbeddingBag(7, 4, mode="sum"), (torch.tensor([[0, 1], [6, 2]]),)),
    "lstm": lambda: (nn.LSTM(3, 4, num_layers=2, batch_first=True), (randn(2, 5, 3),)),
    "lstm both ways": lambda: (nn.LSTM(3, 4, bidirectional=True), (randn(5, 2, 3),)),
    "gru": lambda: (nn.GRU(3, 4), (randn(5, 2, 3),)),
    "rnn": lambda: (nn.RNN(3, 4, nonlinearity="relu"), (randn(5, 2, 3),)),
    "lstm cell": lambda: (nn.LSTMCell(3, 4), (randn(2, 3),)),
    "gru cell": lambda: (nn.GRUCell(3, 4), (randn(2, 3), randn(2, 4))),
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), (randn(2, 5, 8),) * 3),
    "attention with masks": lambda: (
        Whole(
            lambda m, x: m(x, x, x, key_padding_mask=padded(), attn_mask=torch.ones(5, 5).triu(1).bool()),
            nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
        ),
        (randn(2, 5, 8),),
    ),
    "attention without weights": lambda: (
        Whole(lambda m, x: m(x, x, x, need_weights=False)[0], nn.MultiheadAttention(8, 2)),
        (randn(5, 2, 8),),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (randn(2, 5, 8),)),
    "encoder, norm first": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        ),
        (randn(2, 5, 8),),
    ),
    "decoder layer": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (randn(2, 5, 8), randn(2, 3, 8)),
    ),
    "dropout of nothing": lambda: (nn.Dropout(0.0), (randn(3, 4),)),
    "cosine similarity": lambda: (nn.CosineSimilarity(dim=1), (randn(3, 4), randn(3, 4))),
    "pairwise distance": lambda: (nn.PairwiseDistance(), (randn(3, 4), randn(3, 4))),
    "flatten and unflatten": lambda: (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 6))), (randn(2, 3, 4),)),
    "prelu": lambda: (nn.PReLU(3), (image(),)),
    "glu": lambda: (nn.GLU(1), (randn(2, 6, 3),)),
    "softmax over channels": lambda: (nn.Softmax2d(), (image(),)),
    "adaptive softmax": lambda: (
        nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]),
        (randn(5, 6), torch.tensor([0, 5, 11, 3, 8])),
    ),
    "activations": lambda: (Whole(lambda *given: [m(given[-1]) for m in given[:-1]], *_ACTIVATIONS), (randn(3, 5),)),
}
_ACTIVATIONS = (
    *(nn.ELU(), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Hardswish(), nn.LeakyReLU(), nn.LogSigmoid()),
    *(nn.ReLU6(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"), nn.Sigmoid(), nn.SiLU(), nn.Mish(), nn.Softmin(-1)),
    *(nn.Softplus(), nn.Softshrink(), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(), nn.Threshold(0.1, 2.0)),
    *(nn.Softmax(-1), nn.LogSoftmax(-1)),
)


def _classes() -> tuple[object, ...]:
    return randn(5, 4), torch.tensor([0, 3, 1, 1, 2])


def _pair() -> tuple[object, ...]:
    return randn(5, 4), randn(5, 4, seed=1)


def _labels() -> torch.Tensor:
    return torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])


LOSSES: Mapping[str, Callable[[], Made]] = {
    "cross entropy": lambda: (nn.CrossEntropyLoss(), _classes()),
    "weighted cross entropy": lambda: (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), ignore_index=1, label_smoothing=0.1),
        _classes(),
    ),
    "cross entropy of images": lambda: (
        nn.CrossEntropyLoss(reduction="none"),
        (randn(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)),
    ),
    "cross entropy of probabilities": lambda: (nn.CrossEntropyLoss(), (randn(5, 4), randn(5, 4, seed=1).softmax(-1))),
    "nll": lambda: (nn.NLLLoss(ignore_index=3), _classes()),
    "poisson nll": lambda: (nn.PoissonNLLLoss(), (randn(5), randn(5, seed=1).abs())),
    "gaussian nll": lambda: (nn.GaussianNLLLoss(), (randn(5, 4), randn(5, 4, seed=1), randn(5, 4, seed=2).abs())),
    "kl divergence": lambda: (
        nn.KLDivLoss(reduction="batchmean"),
        (randn(5, 4).log_softmax(-1), randn(5, 4).softmax(-1)),
    ),
    "l1": lambda: (nn.L1Loss(), _pair()),
    "mse": lambda: (nn.MSELoss(reduction="sum"), _pair()),
    "huber": lambda: (nn.HuberLoss(delta=0.5), _pair()),
    "smooth l1": lambda: (nn.SmoothL1Loss(), _pair()),
    "bce": lambda: (nn.BCELoss(), (randn(5).sigmoid(), randn(5, seed=1).sigmoid())),
    "bce of logits": lambda: (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
        (randn(5), randn(5, seed=1).sigmoid()),
    ),
    "hinge embedding": lambda: (nn.HingeEmbeddingLoss(), (randn(5), _labels())),
    "margin ranking": lambda: (nn.MarginRankingLoss(0.1), (randn(5), randn(5, seed=1), _labels())),
    "cosine embedding": lambda: (nn.CosineEmbeddingLoss(0.1), (*_pair(), _labels())),
    "soft margin": lambda: (nn.SoftMarginLoss(), (randn(5), _labels())),
    "multi margin": lambda: (nn.MultiMarginLoss(), _classes()),
    "multi label soft margin": lambda: (nn.MultiLabelSoftMarginLoss(), (randn(5, 4), (randn(5, 4) > 0).float())),
    "triplet": lambda: (nn.TripletMarginLoss(), (*_pair(), randn(5, 4, seed=2))),
    "ctc": lambda: (
        nn.CTCLoss(),
        (randn(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 6]), torch.tensor([2, 2])),
    ),
}
