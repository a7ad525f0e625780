"""Sixty-four plain PyTorch programs: single operators over unusual axes, chains after a product, small networks."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

TRAIN = (
    "ConvBatchScaleGeluPool",
    "ConvGroupTanhResidualLse",
    "PatchConvNormGelu",
    "TransposedVolumeNormPoolGelu",
    "LinearGroupHardtanh",
    "LinearSwishClampTanh",
    "LinearBatchBiasSwish",
    "LinearLseLeakyGelu",
    "PlainDenseLayers",
    "FirePair",
    "RegNetXStage",
    "GhostNetVlad",
    "HandWrittenLstm",
    "MinGptBlock",
    "ReluSelfAttention",
    "SwinMlpBlock",
)


def _bf(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Single operators
# ---------------------------------------------------------------------------------------------------------------------


def frobenius_scaled(x):
    """A tensor over its Frobenius norm."""
    return x / torch.norm(x, p="fro")


def frobenius_scaled_inputs():
    return (_bf(64, 64, 96, 96),)


def l1_over_middle(x):
    """A tensor over the L1 norm of its two middle axes."""
    return x / x.abs().sum(dim=(1, 2), keepdim=True).clamp_min(1e-6)


def l1_over_middle_inputs():
    return (_bf(64, 48, 50, 256),)


def prod_over_middle(x):
    """Products along a middle axis."""
    return torch.prod(x, dim=1)


def prod_over_middle_inputs():
    return (1 + 0.1 * torch.randn(64, 48, 8192),)


def argmin_over_middle(x):
    """Places of the least along a middle axis."""
    return torch.argmin(x, dim=1)


def argmin_over_middle_inputs():
    return (torch.randn(64, 777, 512),)


def masked_cumsum(x, mask):
    """Running sums of what a mask keeps."""
    return torch.cumsum(x * mask, dim=1)


def masked_cumsum_inputs():
    return torch.randn(4096, 6000), torch.rand(4096, 6000) > 0.4


def reverse_cumsum(x):
    """Running sums from the end of a middle axis."""
    return torch.cumsum(x.flip(1), dim=1).flip(1)


def reverse_cumsum_inputs():
    return (torch.randn(32, 1000, 512),)


def dilated_max_pool_1d(x):
    """Maxima of seven taps, three apart, along time."""
    return F.max_pool1d(x, kernel_size=7, stride=2, padding=3, dilation=3)


def dilated_max_pool_1d_inputs():
    return (_bf(64, 192, 4000),)


def odd_average_pool_3d(x):
    """Means of 3x5x3 places of a volume, padding not counted."""
    return F.avg_pool3d(x, kernel_size=(3, 5, 3), stride=2, padding=(1, 2, 1), count_include_pad=False)


def odd_average_pool_3d_inputs():
    return (_bf(16, 32, 24, 56, 56),)


def group_norm_volume(x, weight, bias):
    """Group norm of volumes."""
    return F.group_norm(x, 12, weight, bias)


def group_norm_volume_inputs():
    return _bf(8, 96, 16, 48, 48), _bf(96), _bf(96)


def cosine_embedding(a, b, label):
    """Cosine embedding loss of pairs with a margin."""
    return F.cosine_embedding_loss(a, b, label, margin=0.2)


def cosine_embedding_inputs():
    return _bf(32768, 384), _bf(32768, 384), torch.randint(0, 2, (32768,)) * 2 - 1


def lower_triangular_product(a, b):
    """The product of two lower triangular matrices."""
    return torch.tril(torch.matmul(a, b))


def lower_triangular_product_inputs():
    return torch.tril(_bf(3000, 3000)), torch.tril(_bf(3000, 3000) * 3000**-0.5)


def diagonal_product(d, b):
    """A diagonal matrix times a matrix."""
    return torch.diag(d) @ b


def diagonal_product_inputs():
    return _bf(4096), _bf(4096, 3000)


def tensor_4d_product(x, w):
    """A tensor of four axes times a matrix on the last."""
    return torch.einsum("bijl,lk->bijk", x, w)


def tensor_4d_product_inputs():
    return _bf(4, 120, 256, 256), _bf(256, 768) / 16


def depthwise_separable_5x5(x, depth, point):
    """A depthwise 5x5 convolution and one of a single tap."""
    return F.conv2d(F.conv2d(x, depth, padding=2, groups=x.shape[1]), point)


def depthwise_separable_5x5_inputs():
    return _bf(32, 96, 64, 64), _bf(96, 1, 5, 5) / 5, _bf(192, 96, 1, 1) * 96**-0.5


def transposed_conv_3d_uneven(x, w, b):
    """A transposed 3D convolution whose axes differ in stride, dilation and padding."""
    return F.conv_transpose3d(
        x, w, b, stride=(1, 2, 2), padding=(1, 2, 1), output_padding=(0, 1, 1), dilation=(1, 2, 1)
    )


def transposed_conv_3d_uneven_inputs():
    return _bf(8, 48, 12, 40, 40), _bf(48, 32, 3, 3, 3) * 0.03, _bf(32)


def softsign_wide(x):
    """Softsign of a wide matrix."""
    return F.softsign(x)


def softsign_wide_inputs():
    return (_bf(4096, 24000),)


# ---------------------------------------------------------------------------------------------------------------------
# Chains after a convolution of images
# ---------------------------------------------------------------------------------------------------------------------


class ConvMinTanhTwice(nn.Module):
    """A convolution, the least channel, tanh twice and a learnt shift."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3)
        self.shift = nn.Parameter(torch.randn(1, 1, 1))
        self.to(torch.bfloat16)

    def forward(self, x):
        y = torch.min(self.conv(x), dim=1, keepdim=True)[0]
        return torch.tanh(torch.tanh(y)) + self.shift


def ConvMinTanhTwice_inputs():
    return (_bf(128, 32, 64, 64),)


class ConvBatchScaleGeluPool(nn.Module):
    """A strided convolution, batch norm, a learnt scale, GELU and the mean of each image."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(128)
        self.scale = nn.Parameter(torch.randn(128, 1, 1))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = F.gelu(self.norm(self.conv(x)) * self.scale)
        return F.adaptive_avg_pool2d(y, 1).flatten(1)


def ConvBatchScaleGeluPool_inputs():
    return (_bf(64, 64, 64, 64),)


class ConvGroupTanhResidualLse(nn.Module):
    """A convolution, group norm, tanh, hard swish, a residual and log-sum-exp of channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 64, 3, padding=1)
        self.norm = nn.GroupNorm(8, 64)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.conv(x)
        z = y + F.hardswish(torch.tanh(self.norm(y)))
        return torch.logsumexp(z, dim=1, keepdim=True)


def ConvGroupTanhResidualLse_inputs():
    return (_bf(100, 16, 60, 60),)


class ConvInstanceDivideMax(nn.Module):
    """A convolution, instance norm, a division, leaky ReLU and the maximum along the width."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 96, (3, 5), padding=(1, 2))
        self.norm = nn.InstanceNorm2d(96, affine=True)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = F.leaky_relu(self.norm(self.conv(x)) / 2.5, 0.1)
        return torch.max(y, dim=3)[0]


def ConvInstanceDivideMax_inputs():
    return (_bf(64, 32, 48, 80),)


def dilated_conv_pool_sigmoid_sum(x, w, b):
    """A dilated 5x5 convolution, means of 4x4, sigmoid and the sum of each image."""
    y = F.avg_pool2d(F.conv2d(x, w, b, dilation=2), 4)
    return torch.sigmoid(y).sum(dim=(1, 2, 3))


def dilated_conv_pool_sigmoid_sum_inputs():
    return _bf(128, 16, 72, 72), _bf(64, 16, 5, 5) / 20, _bf(64)


class PatchConvNormGelu(nn.Module):
    """A convolution of patches, layer norm of channels, GELU, a learnt scale and a residual of means."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 128, 4, stride=4)
        self.norm = nn.LayerNorm(128, eps=1e-6)
        self.scale = nn.Parameter(torch.full((128,), 0.3))
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        y = F.gelu(self.norm(y)) * self.scale
        return y.permute(0, 3, 1, 2) + F.avg_pool2d(x, 4).mean(dim=1, keepdim=True)


def PatchConvNormGelu_inputs():
    return (_bf(64, 32, 128, 128),)


def conv_mish_spread_shares(x, w, b):
    """A convolution, Mish, the deviation of each channel's image and its share of all channels."""
    y = torch.std(F.mish(F.conv2d(x, w, b, stride=2)), dim=(2, 3))
    return y / y.sum(dim=1, keepdim=True)


def conv_mish_spread_shares_inputs():
    return _bf(64, 48, 96, 96), _bf(96, 48, 3, 3) / 20, _bf(96)


class ConvWarpResidual(nn.Module):
    """A convolution's offsets through tanh, an image sampled there, a residual and a clamp."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Conv2d(24, 2, 5, padding=2)
        self.to(torch.bfloat16)

    def forward(self, x):
        h, w = x.shape[2:]
        ys = torch.linspace(-1, 1, h, device=x.device)
        xs = torch.linspace(-1, 1, w, device=x.device)
        base = torch.stack((xs.expand(h, w), ys[:, None].expand(h, w)), dim=-1)
        grid = base + 0.03 * torch.tanh(self.offset(x)).float().permute(0, 2, 3, 1)
        warped = F.grid_sample(x.float(), grid, padding_mode="border", align_corners=True)
        return (x + warped.to(x.dtype)).clamp(-3, 3)


def ConvWarpResidual_inputs():
    return (_bf(32, 24, 96, 128),)


# ---------------------------------------------------------------------------------------------------------------------
# Chains after a transposed convolution of images
# ---------------------------------------------------------------------------------------------------------------------


class TransposedConvMinSumGelu(nn.Module):
    """A transposed convolution, the least channel, scaled sums along the height, GELU and a bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(64, 48, 3, stride=2, padding=1, output_padding=1)
        self.bias = nn.Parameter(torch.randn(48, 1, 1) * 0.1)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = torch.min(self.conv(x), dim=1, keepdim=True)[0]
        y = torch.sum(y, dim=2, keepdim=True) * 0.05
        return F.gelu(y) + self.bias


def TransposedConvMinSumGelu_inputs():
    return (_bf(64, 64, 32, 48),)


class TransposedConvBatchTanhPoolGroup(nn.Module):
    """A transposed 5x5 convolution, batch norm, tanh, maxima of 2x2 and group norm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(32, 64, 5, padding=1)
        self.batch, self.group = nn.BatchNorm2d(64), nn.GroupNorm(4, 64)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = F.max_pool2d(torch.tanh(self.batch(self.conv(x))), 2)
        return self.group(y)


def TransposedConvBatchTanhPoolGroup_inputs():
    return (_bf(128, 32, 32, 32),)


def transposed_conv_centre_hardtanh_mean(x, w, b):
    """A dilated transposed convolution, its channels' mean taken off, hard tanh and the mean of each image."""
    y = F.conv_transpose2d(x, w, b, stride=2, padding=2, dilation=2, output_padding=1)
    y = F.hardtanh(y - y.mean(dim=1, keepdim=True), -0.5, 1.5)
    return torch.tanh(y.mean(dim=(2, 3), keepdim=True))


def transposed_conv_centre_hardtanh_mean_inputs():
    return _bf(64, 48, 40, 40), _bf(48, 72, 3, 3) / 15, _bf(72)


# ---------------------------------------------------------------------------------------------------------------------
# Chains after a convolution of volumes
# ---------------------------------------------------------------------------------------------------------------------


class VolumeMinSoftmax(nn.Module):
    """A 3D convolution, the least along the depth, a learnt bias and softmax of channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(16, 48, 3)
        self.bias = nn.Parameter(torch.randn(1, 48, 1, 1))
        self.to(torch.bfloat16)

    def forward(self, x):
        y = torch.min(self.conv(x), dim=2)[0] + self.bias
        return torch.softmax(y, dim=1)


def VolumeMinSoftmax_inputs():
    return (_bf(32, 16, 18, 34, 34),)


class VolumeSwishGroupMean(nn.Module):
    """A 3x5x3 convolution, hard swish, group norm, ReLU and the mean of each volume."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(24, 64, (3, 5, 3), padding=(1, 2, 1), bias=False)
        self.norm = nn.GroupNorm(4, 64)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = F.relu(self.norm(F.hardswish(self.conv(x))))
        return y.mean(dim=(2, 3, 4))


def VolumeSwishGroupMean_inputs():
    return (_bf(16, 24, 16, 32, 32),)


def volume_pool_lse_scale_sigmoid(x, w, b, scale):
    """A strided 3D convolution, maxima of 2x2x2, log-sum-exp of channels, a map of scales and sigmoid."""
    y = F.max_pool3d(F.conv3d(x, w, b, stride=(1, 2, 2), padding=1), 2)
    y = torch.logsumexp(y, dim=1, keepdim=True)
    return torch.sigmoid(F.relu(y) * scale)


def volume_pool_lse_scale_sigmoid_inputs():
    return _bf(16, 16, 16, 64, 64), _bf(64, 16, 3, 3, 3) / 20, _bf(64), _bf(16, 16)


class TransposedVolumeNormPoolGelu(nn.Module):
    """A transposed 3D convolution, a learnt number added, layer norm of the width, means of 2x2x2 and GELU."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose3d(32, 48, 3, stride=2, padding=1, output_padding=1)
        self.shift = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(64)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.norm(self.conv(x) + self.shift)
        return F.gelu(F.avg_pool3d(y, 2))


def TransposedVolumeNormPoolGelu_inputs():
    return (_bf(8, 32, 12, 32, 32),)


class TransposedVolumeBatchCentre(nn.Module):
    """A transposed 3D convolution, batch norm, each volume's mean taken off, clamp and itself added."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose3d(32, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(32)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = self.norm(self.conv(x))
        y = y - y.mean(dim=(2, 3, 4), keepdim=True)
        return y + y.clamp(min=-0.2, max=0.8)


def TransposedVolumeBatchCentre_inputs():
    return (_bf(8, 32, 16, 32, 32),)


class TransposedVolumePoolSpatialSoftmax(nn.Module):
    """A transposed 3D convolution, means of 2x2x2, clamp, softmax over all places and a scale of channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose3d(24, 48, (3, 4, 4), stride=(1, 2, 2), padding=1)
        self.scale = nn.Parameter(torch.ones(1, 48, 1, 1, 1) * 3)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = F.avg_pool3d(self.conv(x), 2).clamp(0, 1)
        y = torch.softmax(y.flatten(2), dim=2).view(y.shape)
        return y * self.scale


def TransposedVolumePoolSpatialSoftmax_inputs():
    return (_bf(16, 24, 16, 28, 28) * 8,)


# ---------------------------------------------------------------------------------------------------------------------
# Chains after a convolution along time
# ---------------------------------------------------------------------------------------------------------------------


class Conv1dInstanceGluPool(nn.Module):
    """A strided convolution along time, instance norm, a gate by halves, maxima of three and a bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(64, 256, 7, stride=2, padding=3)
        self.norm = nn.InstanceNorm1d(256, affine=True)
        self.bias = nn.Parameter(torch.randn(128, 1))
        self.to(torch.bfloat16)

    def forward(self, x):
        y = F.glu(self.norm(self.conv(x)), dim=1)
        return F.max_pool1d(y, 3, stride=2) + self.bias


def Conv1dInstanceGluPool_inputs():
    return (_bf(64, 64, 4096),)


def conv1d_softmax_scale_centre(x, w, b, scale):
    """A dilated convolution along time, softmax of channels, scales, the mean of time taken off and a clamp."""
    y = torch.softmax(F.conv1d(x, w, b, padding=6, dilation=3), dim=1) * scale[:, None]
    return (y - y.mean(dim=2, keepdim=True)).clamp(-0.5, 0.5)


def conv1d_softmax_scale_centre_inputs():
    return _bf(32, 128, 4000), _bf(96, 128, 5) / 20, _bf(96), _bf(96) * 4


class TransposedConv1dMishMean(nn.Module):
    """A transposed convolution along time, Mish, the input repeated and added, tanh and the mean of channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose1d(96, 96, 8, stride=4, padding=2)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = F.mish(self.conv(x)) + F.interpolate(x, scale_factor=4, mode="nearest")
        return torch.tanh(y).mean(dim=1, keepdim=True)


def TransposedConv1dMishMean_inputs():
    return (_bf(32, 96, 2000),)


# ---------------------------------------------------------------------------------------------------------------------
# Chains after a product of matrices
# ---------------------------------------------------------------------------------------------------------------------


class LinearGroupHardtanh(nn.Module):
    """A linear map, group norm of its columns, hard tanh and a learnt scale."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2048, 4096)
        self.norm = nn.GroupNorm(16, 4096)
        self.scale = nn.Parameter(torch.randn(4096))
        self.to(torch.bfloat16)

    def forward(self, x):
        return F.hardtanh(self.norm(self.linear(x)), -2.0, 2.0) * self.scale


def LinearGroupHardtanh_inputs():
    return (_bf(1024, 2048),)


class LinearSwishClampTanh(nn.Module):
    """A linear map, swish, a division, clamp, tanh and a clamp again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 8192)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.linear(x)
        y = (y * torch.sigmoid(y)) / 0.5
        y = torch.tanh(torch.clamp(y, -1.0, 1.0))
        return torch.clamp(y, -0.7, 0.7)


def LinearSwishClampTanh_inputs():
    return (_bf(1000, 1024),)


class LinearDropoutMeanResidual(nn.Module):
    """A linear map less a vector, dropout, the mean of each row through GELU, and the input added."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4096, 4096)
        self.subtract = nn.Parameter(torch.randn(4096))
        self.dropout = nn.Dropout(0.2)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = self.dropout(self.linear(x) - self.subtract)
        return F.gelu(y.mean(dim=1, keepdim=True)) + x


def LinearDropoutMeanResidual_inputs():
    return (_bf(512, 4096),)


class LinearPoolGeluMax(nn.Module):
    """A linear map, means of 16 columns, GELU, a scale and the largest of each row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3072, 6144)
        self.pool = nn.AvgPool1d(16)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = self.pool(self.linear(x).unsqueeze(1)).squeeze(1)
        return torch.max(F.gelu(y) * 2.0, dim=1)[0]


def LinearPoolGeluMax_inputs():
    return (_bf(768, 3072),)


class LinearBatchBiasSwish(nn.Module):
    """A linear map, batch norm, one learnt number added, a division and swish."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4096, 2048)
        self.norm = nn.BatchNorm1d(2048)
        self.bias = nn.Parameter(torch.randn(1))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = (self.norm(self.linear(x)) + self.bias) / 1.5
        return y * torch.sigmoid(y)


def LinearBatchBiasSwish_inputs():
    return (_bf(1024, 4096),)


class LinearLseLeakyGelu(nn.Module):
    """A linear map, log-sum-exp of rows, leaky ReLU twice and GELU twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2048, 5000)
        self.to(torch.bfloat16)

    def forward(self, x):
        y = torch.logsumexp(self.linear(x), dim=1, keepdim=True)
        y = F.leaky_relu(F.leaky_relu(y, 0.01), 0.01)
        return F.gelu(F.gelu(y))


def LinearLseLeakyGelu_inputs():
    return (_bf(1024, 2048) * 4,)


def bmm_kth_shares(a, b):
    """A scaled batched product, what exceeds the 33rd largest of each row, over its sum."""
    y = torch.bmm(a, b).float() * a.shape[-1] ** -0.5
    kth = torch.kthvalue(y, y.shape[-1] - 32, dim=-1, keepdim=True)[0]
    y = F.relu(y - kth)
    return y / (y.sum(dim=-1, keepdim=True) + 1e-3)


def bmm_kth_shares_inputs():
    return _bf(32, 256, 128), _bf(32, 128, 384)


def transposed_bmm_exclusive_cumsum(a, b):
    """A batched product of transposed operands, sigmoid, sums of those before, over the row's total."""
    y = torch.sigmoid(torch.matmul(a.transpose(1, 2), b.transpose(1, 2)) * a.shape[1] ** -0.5).float()
    before = F.pad(y, (1, 0))[..., :-1].cumsum(dim=-1)
    return before / y.sum(dim=-1, keepdim=True)


def transposed_bmm_exclusive_cumsum_inputs():
    return _bf(24, 192, 512), _bf(24, 640, 192)


# ---------------------------------------------------------------------------------------------------------------------
# Convolutional networks
# ---------------------------------------------------------------------------------------------------------------------


class _ConvNorm(nn.Sequential):
    def __init__(self, cin, cout, kernel, stride=1, padding=0, groups=1, act=nn.ReLU):
        super().__init__(
            nn.Conv2d(cin, cout, kernel, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(cout), act()
        )


class LeNet(nn.Module):
    """LeNet-5 on 32x32 digits."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 20)
        self.to(torch.bfloat16)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def LeNet_inputs():
    return (_bf(2048, 1, 32, 32),)


class SmallAlexNet(nn.Module):
    """AlexNet on small images, with dropout in its classifier."""

    def __init__(self, classes=200):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 192, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(192 * 9, 2048),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(2048, classes),
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def SmallAlexNet_inputs():
    return (_bf(64, 3, 128, 128),)


class FactorisedInception(nn.Module):
    """Inception v3's module of 17x17: convolutions of 1x7 and 7x1 side by side with pooling."""

    def __init__(self, cin=768, mid=128):
        super().__init__()
        self.one = _ConvNorm(cin, 192, 1)
        self.single = nn.Sequential(
            _ConvNorm(cin, mid, 1),
            _ConvNorm(mid, mid, (1, 7), padding=(0, 3)),
            _ConvNorm(mid, 192, (7, 1), padding=(3, 0)),
        )
        self.twice = nn.Sequential(
            _ConvNorm(cin, mid, 1),
            _ConvNorm(mid, mid, (7, 1), padding=(3, 0)),
            _ConvNorm(mid, mid, (1, 7), padding=(0, 3)),
            _ConvNorm(mid, mid, (7, 1), padding=(3, 0)),
            _ConvNorm(mid, 192, (1, 7), padding=(0, 3)),
        )
        self.pooled = _ConvNorm(cin, 192, 1)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        pooled = self.pooled(F.avg_pool2d(x, 3, stride=1, padding=1))
        return torch.cat((self.one(x), self.single(x), self.twice(x), pooled), dim=1)


def FactorisedInception_inputs():
    return (_bf(32, 768, 17, 17),)


class PlainDenseLayers(nn.Module):
    """DenseNet of small images: three layers without bottlenecks and a transition."""

    def __init__(self, cin=48, growth=24, layers=3):
        super().__init__()
        widths = [cin + i * growth for i in range(layers + 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, growth, 3, padding=1, bias=False))
            for c in widths[:-1]
        )
        c = widths[-1]
        self.transition = nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c // 2, 1), nn.AvgPool2d(2))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat((x, layer(x)), dim=1)
        return self.transition(x)


def PlainDenseLayers_inputs():
    return (_bf(64, 48, 32, 32),)


class _Fire(nn.Module):
    def __init__(self, cin, squeeze, expand):
        super().__init__()
        self.squeeze = nn.Conv2d(cin, squeeze, 1)
        self.one, self.three = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return torch.cat((F.relu(self.one(x)), F.relu(self.three(x))), dim=1)


class FirePair(nn.Module):
    """SqueezeNet: two fire modules, the second bypassed, and the mean of each image."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _Fire(96, 16, 64), _Fire(128, 16, 64)
        self.to(torch.bfloat16)

    def forward(self, x):
        x = self.first(x)
        x = x + self.second(x)
        return x.mean(dim=(2, 3))


def FirePair_inputs():
    return (_bf(32, 96, 55, 55),)


class ShuffleDownUnit(nn.Module):
    """ShuffleNet v2's unit of stride two: both branches go down, then the channels are shuffled."""

    def __init__(self, cin=24, cout=116):
        super().__init__()
        half = cout // 2
        self.left = nn.Sequential(
            _ConvNorm(cin, cin, 3, stride=2, padding=1, groups=cin, act=nn.Identity), _ConvNorm(cin, half, 1)
        )
        self.right = nn.Sequential(
            _ConvNorm(cin, half, 1),
            _ConvNorm(half, half, 3, stride=2, padding=1, groups=half, act=nn.Identity),
            _ConvNorm(half, half, 1),
        )
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        y = torch.cat((self.left(x), self.right(x)), dim=1)
        return F.channel_shuffle(y, 2)


def ShuffleDownUnit_inputs():
    return (_bf(128, 24, 56, 56),)


class _MbConv(nn.Module):
    def __init__(self, cin, cout, kernel, stride, expand=6):
        super().__init__()
        mid, narrow = cin * expand, cin // 4
        self.residual = stride == 1 and cin == cout
        self.grow = _ConvNorm(cin, mid, 1, act=nn.SiLU)
        self.deep = _ConvNorm(mid, mid, kernel, stride, kernel // 2, groups=mid, act=nn.SiLU)
        self.reduce, self.expand = nn.Conv2d(mid, narrow, 1), nn.Conv2d(narrow, mid, 1)
        self.project = _ConvNorm(mid, cout, 1, act=nn.Identity)

    def forward(self, x):
        y = self.deep(self.grow(x))
        gate = self.expand(F.silu(self.reduce(F.adaptive_avg_pool2d(y, 1))))
        y = self.project(y * torch.sigmoid(gate))
        return x + y if self.residual else y


class MbConvStage(nn.Module):
    """EfficientNet's stage: a 5x5 MBConv of stride two and one with a residual."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(_MbConv(24, 40, 5, 2), _MbConv(40, 40, 5, 1))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        return self.blocks(x)


def MbConvStage_inputs():
    return (_bf(64, 24, 56, 56),)


class _RegNetX(nn.Module):
    def __init__(self, cin, cout, stride, width=24):
        super().__init__()
        self.body = nn.Sequential(
            _ConvNorm(cin, cout, 1),
            _ConvNorm(cout, cout, 3, stride, 1, groups=cout // width),
            _ConvNorm(cout, cout, 1, act=nn.Identity),
        )
        plain = stride == 1 and cin == cout
        self.shortcut = nn.Identity() if plain else _ConvNorm(cin, cout, 1, stride, act=nn.Identity)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class RegNetXStage(nn.Module):
    """RegNetX's stage of two blocks of grouped convolutions, the first of stride two."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(_RegNetX(72, 168, 2), _RegNetX(168, 168, 1))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        return self.blocks(x)


def RegNetXStage_inputs():
    return (_bf(32, 72, 56, 56),)


class SoftmaxAttentionUNet(nn.Module):
    """A U-Net of one level, whose lower places attend to one another by softmax."""

    def __init__(self, cin=16, width=48):
        super().__init__()
        self.enter = nn.Sequential(_ConvNorm(cin, width, 3, padding=1), _ConvNorm(width, width, 3, padding=1))
        self.low = _ConvNorm(width, 2 * width, 3, padding=1)
        self.qkv, self.out = nn.Conv2d(2 * width, 6 * width, 1), nn.Conv2d(2 * width, 2 * width, 1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(_ConvNorm(2 * width, width, 3, padding=1), nn.Conv2d(width, 4, 1))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        skip = self.enter(x)
        y = self.low(F.max_pool2d(skip, 2))
        q, k, v = self.qkv(y).flatten(2).chunk(3, dim=1)
        p = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(q.shape[1]), dim=-1)
        y = y + self.out((v @ p.transpose(1, 2)).view_as(y))
        return self.leave(torch.cat((self.up(y), skip), dim=1))


def SoftmaxAttentionUNet_inputs():
    return (_bf(16, 16, 64, 64),)


# ---------------------------------------------------------------------------------------------------------------------
# Recurrent networks, attention and perceptrons
# ---------------------------------------------------------------------------------------------------------------------


class GhostNetVlad(nn.Module):
    """NetVLAD with ghost clusters: soft assignment, residuals to centres, normalised within and over all."""

    def __init__(self, dim=512, clusters=32, ghosts=16):
        super().__init__()
        self.clusters = clusters
        self.assign = nn.Parameter(torch.randn(dim, clusters + ghosts) * dim**-0.5)
        self.norm = nn.BatchNorm1d(clusters + ghosts)
        self.centres = nn.Parameter(torch.randn(1, dim, clusters) * dim**-0.5)
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        b, n, d = x.shape
        a = torch.softmax(self.norm(x.reshape(-1, d) @ self.assign), dim=1)
        a = a[:, : self.clusters].view(b, n, self.clusters)
        moved = a.sum(dim=1, keepdim=True) * self.centres
        vlad = torch.matmul(a.transpose(1, 2), x).transpose(1, 2) - moved
        vlad = F.normalize(vlad, dim=1)
        return F.normalize(vlad.reshape(b, -1), dim=1)


def GhostNetVlad_inputs():
    return (_bf(128, 100, 512),)


class VanillaRnn(nn.Module):
    """Eight steps of a plain recurrent cell on input and state joined, each with its output."""

    def __init__(self, width=256, hidden=768, out=128):
        super().__init__()
        self.state, self.out = nn.Linear(width + hidden, hidden), nn.Linear(hidden, out)
        self.to(torch.bfloat16)

    def forward(self, x, h):
        ys = []
        for t in range(x.shape[0]):
            h = torch.tanh(self.state(torch.cat((x[t], h), dim=1)))
            ys.append(self.out(h))
        return torch.stack(ys, dim=0), h


def VanillaRnn_inputs():
    return _bf(8, 256, 256), _bf(256, 768)


class HandWrittenLstm(nn.Module):
    """Eight steps of an LSTM by hand from packed gates, and a linear map of the last state."""

    def __init__(self, width=384, hidden=512):
        super().__init__()
        self.x, self.h = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.head = nn.Linear(hidden, 100)
        self.to(torch.bfloat16)

    def forward(self, x, h, c):
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h), c


def HandWrittenLstm_inputs():
    return _bf(192, 8, 384), _bf(192, 512), _bf(192, 512)


class HandWrittenGru(nn.Module):
    """Eight steps of a GRU by hand, whose input product is made for all steps at once."""

    def __init__(self, width=512, hidden=640):
        super().__init__()
        self.x, self.h = nn.Linear(width, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.to(torch.bfloat16)

    def forward(self, x, h):
        gates, ys = self.x(x), []
        for t in range(x.shape[1]):
            xr, xz, xn = gates[:, t].chunk(3, dim=1)
            hr, hz, hn = self.h(h).chunk(3, dim=1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + r * hn) + z * h
            ys.append(h)
        return torch.stack(ys, dim=1)


def HandWrittenGru_inputs():
    return _bf(160, 8, 512), _bf(160, 640)


def _new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MinGptBlock(nn.Module):
    """minGPT's block: causal attention by hand from a stored mask, and a perceptron of its own GELU."""

    def __init__(self, dim=512, heads=8, length=500):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.to(torch.bfloat16)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(self.ln1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(_new_gelu(self.up(self.ln2(x))))


def MinGptBlock_inputs():
    return (_bf(16, 500, 512),)


class ReluSelfAttention(nn.Module):
    """Causal self-attention with packed projections whose masked scores go through ReLU instead of softmax."""

    def __init__(self, dim=768, heads=12, length=512):
        super().__init__()
        self.heads = heads
        self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.to(torch.bfloat16)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.relu(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")))
        return self.proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


def ReluSelfAttention_inputs():
    return (_bf(8, 512, 768),)


def mamba2_final_state(x, a, b, initial):
    """Mamba2's chunks gathered to the last state only, from an initial one."""
    _, length, h, _ = x.shape
    q = 64
    x, b = (t.reshape(-1, length // q, q, *t.shape[2:]) for t in (x, b))
    s = a.reshape(-1, length // q, q, h).permute(0, 3, 1, 2).cumsum(-1)
    within = torch.exp(s[..., -1:] - s).to(x.dtype)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, within, x)
    states = torch.cat((initial[:, None], states), 1)
    total = F.pad(s[..., -1], (1, 0)).cumsum(-1)
    across = torch.exp(total[..., -1:] - total).to(x.dtype)
    return torch.einsum("bhc,bchpn->bhpn", across, states)


def mamba2_final_state_inputs():
    return _bf(4, 2048, 16, 64), -torch.rand(4, 2048, 16) * 0.1, _bf(4, 2048, 16, 48), _bf(4, 16, 64, 48)


class SwinMlpBlock(nn.Module):
    """Swin-MLP: shifted windows mixed per head by a grouped convolution of one tap, and a perceptron."""

    def __init__(self, dim=96, heads=3, window=7, shift=3, side=56):
        super().__init__()
        self.heads, self.window, self.side = heads, window, side
        self.pads = (0, 0, window - shift, shift, window - shift, shift)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.spatial = nn.Conv1d(heads * window**2, heads * window**2, 1, groups=heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.to(torch.bfloat16)

    def forward(self, x):
        b, n, c = x.shape
        m, s = self.window, self.side
        y = F.pad(self.norm1(x).view(b, s, s, c), self.pads)
        wide = y.shape[1]
        y = y.view(b, wide // m, m, wide // m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, m * m, c)
        y = y.view(-1, m * m, self.heads, c // self.heads).transpose(1, 2)
        y = self.spatial(y.reshape(-1, self.heads * m * m, c // self.heads))
        y = y.view(-1, self.heads, m * m, c // self.heads).transpose(1, 2).reshape(-1, m, m, c)
        y = y.view(b, wide // m, wide // m, m, m, c).permute(0, 1, 3, 2, 4, 5).reshape(b, wide, wide, c)
        top = self.pads[2]
        y = y[:, top : top + s, top : top + s].reshape(b, n, c)
        x = x + y
        return x + self.mlp(self.norm2(x))


def SwinMlpBlock_inputs():
    return (_bf(32, 3136, 96),)


class _Encoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """A vision transformer of two layers: patches, class token, positions, encoder and head."""

    def __init__(self, dim=192, heads=3, layers=2, classes=100):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, stride=16)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 197, dim) * 0.02)
        self.layers = nn.Sequential(*(_Encoder(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        self.to(torch.bfloat16)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


def TinyViT_inputs():
    return (_bf(64, 3, 224, 224),)


class ConvViTStage(nn.Module):
    """CvT's stage: convolved tokens, and attention of depthwise convolved queries, keys and values."""

    def __init__(self, cin=64, dim=192, heads=3):
        super().__init__()
        self.heads = heads
        self.embed, self.norm0 = nn.Conv2d(cin, dim, 3, stride=2, padding=1), nn.LayerNorm(dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.deep = nn.ModuleList(
            _ConvNorm(dim, dim, 3, stride, 1, groups=dim, act=nn.Identity) for stride in (1, 2, 2)
        )
        self.flat = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.to(torch.bfloat16)
        self.eval()

    def forward(self, x):
        x = self.embed(x)
        b, c, h, w = x.shape
        x = self.norm0(x.flatten(2).transpose(1, 2))
        y = self.norm1(x).transpose(1, 2).view(b, c, h, w)
        q, k, v = (
            flat(deep(y).flatten(2).transpose(1, 2)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for deep, flat in zip(self.deep, self.flat, strict=True)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def ConvViTStage_inputs():
    return (_bf(16, 64, 56, 56),)


class DeepNarrowMlp(nn.Module):
    """Sixteen narrow layers with ReLU between a wide input and few outputs."""

    def __init__(self, wide=1000, width=256, layers=16, out=50):
        super().__init__()
        found = [nn.Linear(wide, width), nn.ReLU()]
        for _ in range(layers):
            found += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*found, nn.Linear(width, out))
        for layer in self.layers[::2]:
            nn.init.kaiming_normal_(layer.weight)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.layers(x)


def DeepNarrowMlp_inputs():
    return (_bf(2048, 1000),)
