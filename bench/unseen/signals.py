"""Sixty plain PyTorch programs of signal and image processing, physics, statistics, graphs and 3D vision."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

TRAIN = (
    "TotalVariationDenoiser",
    "si_sdr_loss",
    "lennard_jones_energy",
    "RungeKuttaMlp",
    "gmm_e_step",
    "kernel_regression",
    "quantile_loss",
    "crps_ensemble_loss",
    "mixture_density_nll",
    "multiclass_hinge_loss",
    "DenseGcn",
    "DenseGat",
    "EgnnLayer",
    "GinBlock",
    "volume_render",
    "giou_loss",
    "focal_tversky_loss",
    "chamfer_loss",
    "photometric_flow_loss",
    "SubPixelNet",
)


# Images


class SobelEdges(nn.Module):
    """Gradient magnitude and normalised direction of gray images by a 3x3 Sobel pair."""

    def __init__(self):
        super().__init__()
        kx = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        self.register_buffer("kernel", torch.stack([kx, kx.t()]).unsqueeze(1))
        self.to(torch.bfloat16)

    def forward(self, img):
        gray = (0.299 * img[:, 0] + 0.587 * img[:, 1] + 0.114 * img[:, 2]).unsqueeze(1)
        grad = F.conv2d(F.pad(gray, (1, 1, 1, 1), mode="replicate"), self.kernel)
        mag = torch.sqrt(grad.pow(2).sum(dim=1, keepdim=True) + 1e-6)
        return mag, grad / mag


def SobelEdges_inputs():
    return (torch.rand(4, 3, 720, 1280, dtype=torch.bfloat16),)


def harris_corners(img):
    """Harris response by central differences and box-averaged structure tensor, with its local maximum."""
    p = F.pad(img, (1, 1, 1, 1), mode="reflect")
    ix = (p[:, :, 1:-1, 2:] - p[:, :, 1:-1, :-2]) * 0.5
    iy = (p[:, :, 2:, 1:-1] - p[:, :, :-2, 1:-1]) * 0.5
    tensor = torch.cat([ix * ix, iy * iy, ix * iy], dim=1)
    a, b, c = F.avg_pool2d(tensor, 5, stride=1, padding=2).unbind(dim=1)
    det = a * b - c * c
    trace = a + b
    response = det - 0.05 * trace**2
    local_max = F.max_pool2d(response.unsqueeze(1), 7, stride=1, padding=3).squeeze(1)
    return response, local_max, response.amax(dim=(-2, -1))


def harris_corners_inputs():
    return (torch.rand(4, 1, 1000, 1333),)


def bilateral_filter(img):
    """Brute-force 5x5 bilateral filter by unfolding the neighbourhood and weighting in space and range."""
    n, c, h, w = img.shape
    k, sigma_space, sigma_range = 5, 1.5, 0.2
    patches = F.unfold(F.pad(img, (2, 2, 2, 2), mode="reflect"), k).view(n, c, k * k, h, w)
    ax = torch.arange(k, device=img.device, dtype=img.dtype) - k // 2
    space = torch.exp(-(ax[:, None] ** 2 + ax[None, :] ** 2) / (2 * sigma_space**2)).reshape(1, 1, k * k, 1, 1)
    diff = (patches - img.unsqueeze(2)).pow(2).sum(dim=1, keepdim=True)
    weight = torch.exp(-diff / (2 * sigma_range**2)) * space
    return (patches * weight).sum(dim=2) / weight.sum(dim=2)


def bilateral_filter_inputs():
    return (torch.rand(2, 3, 320, 480, dtype=torch.bfloat16),)


def unsharp_mask(img, amount):
    """Unsharp masking with a separable depthwise Gaussian and a soft threshold on the detail."""
    c = img.shape[1]
    x = torch.arange(-3, 4, device=img.device, dtype=torch.float32)
    g = torch.exp(-0.5 * (x / 1.2) ** 2)
    g = (g / g.sum()).to(img.dtype)
    blur = F.conv2d(img, g.view(1, 1, 7, 1).expand(c, 1, 7, 1), padding=(3, 0), groups=c)
    blur = F.conv2d(blur, g.view(1, 1, 1, 7).expand(c, 1, 1, 7), padding=(0, 3), groups=c)
    detail = img - blur
    detail = torch.sign(detail) * F.relu(detail.abs() - 0.01)
    return torch.clamp(img + amount.view(-1, 1, 1, 1) * detail, 0.0, 1.0)


def unsharp_mask_inputs():
    return torch.rand(8, 3, 512, 512, dtype=torch.bfloat16), torch.rand(8, dtype=torch.bfloat16) * 2


def histogram_equalise(img):
    """Histogram equalisation of 64-level images by one-hot sums, a cumulative sum and a table lookup."""
    b, h, w = img.shape
    levels = torch.arange(64, device=img.device)
    hist = (img.reshape(b, -1, 1) == levels).sum(dim=1)
    cdf = hist.cumsum(dim=-1).float()
    lo = cdf[:, :1]
    lut = (cdf - lo) / (h * w - lo).clamp(min=1) * 63.0
    return torch.gather(lut, 1, img.reshape(b, -1)).view(b, h, w)


def histogram_equalise_inputs():
    return (torch.randint(0, 64, (16, 256, 333)),)


def top_hat_morphology(img):
    """White and black top-hat and morphological gradient by max pooling (erosion is dilation of the negative)."""

    def dilate(x):
        return F.max_pool2d(x, kernel_size=5, stride=1, padding=2)

    def erode(x):
        return -F.max_pool2d(-x, kernel_size=5, stride=1, padding=2)

    eroded, dilated = erode(img), dilate(img)
    opened, closed = dilate(eroded), erode(dilated)
    return img - opened, closed - img, dilated - eroded


def top_hat_morphology_inputs():
    return (torch.rand(8, 1, 777, 1000, dtype=torch.float16),)


def integral_box_filter(img):
    """Local mean and standard deviation over 15x15 windows from integral images, for adaptive thresholding."""
    r = 7
    stack = torch.stack([img, img * img], dim=1)
    table = F.pad(stack, (r + 1, r, r + 1, r)).cumsum(dim=-1).cumsum(dim=-2)
    k = 2 * r + 1
    total = table[..., k:, k:] - table[..., :-k, k:] - table[..., k:, :-k] + table[..., :-k, :-k]
    mean, sq = (total / k**2).unbind(dim=1)
    std = torch.sqrt(torch.clamp(sq - mean**2, min=0.0) + 1e-4)
    return torch.sigmoid((img - mean * (1.0 + 0.2 * (std / 0.5 - 1.0))) * 20.0), mean


def integral_box_filter_inputs():
    return (torch.rand(4, 600, 801),)


class TotalVariationDenoiser(nn.Module):
    """Five unrolled gradient steps on a smoothed total variation objective with learned step sizes."""

    def __init__(self):
        super().__init__()
        self.step = nn.Parameter(torch.full((5,), 0.1))
        self.weight = nn.Parameter(torch.full((5,), 0.15))
        self.to(torch.bfloat16)

    def forward(self, noisy):
        x = noisy
        for i in range(5):
            dx = F.pad(x[..., :, 1:] - x[..., :, :-1], (0, 1))
            dy = F.pad(x[..., 1:, :] - x[..., :-1, :], (0, 0, 0, 1))
            norm = torch.rsqrt(dx * dx + dy * dy + 1e-2)
            px, py = dx * norm, dy * norm
            div = px - F.pad(px, (1, 0))[..., :-1] + py - F.pad(py, (0, 0, 1, 0))[..., :-1, :]
            x = x - self.step[i] * ((x - noisy) - self.weight[i] * div)
        return x


def TotalVariationDenoiser_inputs():
    return (torch.rand(8, 3, 320, 320, dtype=torch.bfloat16),)


def census_stereo_cost(left, right):
    """Census transform of two images and the Hamming cost of 16 disparities."""

    def census(x):
        h, w = x.shape[-2:]
        p = F.pad(x.unsqueeze(1), (1, 1, 1, 1), mode="replicate").squeeze(1)
        bits = [p[:, i : i + h, j : j + w] < x for i in range(3) for j in range(3) if (i, j) != (1, 1)]
        return torch.stack(bits, dim=1)

    cl, cr = census(left), census(right)
    costs = [(cl ^ torch.roll(cr, d, dims=-1)).sum(dim=1) for d in range(16)]
    return torch.stack(costs, dim=1).to(torch.uint8)


def census_stereo_cost_inputs():
    return torch.rand(2, 375, 1242, dtype=torch.float16), torch.rand(2, 375, 1242, dtype=torch.float16)


def rgb_to_hsv(rgb):
    """RGB to HSV with the branch on the largest channel done by torch.where."""
    r, g, b = rgb.unbind(dim=-3)
    value = rgb.amax(dim=-3)
    delta = value - rgb.amin(dim=-3)
    safe = torch.where(delta == 0, torch.ones_like(delta), delta)
    hue = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2.0 + (b - r) / safe, 4.0 + (r - g) / safe))
    hue = torch.where(hue < 0, hue + 6.0, hue) / 6.0
    sat = torch.where(value > 0, delta / value.clamp(min=1e-8), torch.zeros_like(value))
    return torch.stack([hue, sat, value], dim=-3)


def rgb_to_hsv_inputs():
    return (torch.rand(8, 3, 512, 768, dtype=torch.bfloat16),)


def filmic_tone_map(hdr):
    """Reinhard auto-exposure from the log-average luminance followed by the ACES filmic curve and gamma."""
    lum = 0.2126 * hdr[:, 0:1] + 0.7152 * hdr[:, 1:2] + 0.0722 * hdr[:, 2:3]
    key = torch.exp(torch.log(lum.float() + 1e-4).mean(dim=(1, 2, 3), keepdim=True)).to(hdr.dtype)
    x = hdr * (0.18 / key)
    x = (x * (2.51 * x + 0.03)) / (x * (2.43 * x + 0.59) + 0.14)
    return x.clamp(1e-4, 1.0).pow(1.0 / 2.2)


def filmic_tone_map_inputs():
    return (torch.randn(4, 3, 1080, 1000).exp().to(torch.float16),)


class BilinearDemosaic(nn.Module):
    """RGGB Bayer demosaicing by masked bilinear convolution, white balance and a colour matrix."""

    def __init__(self):
        super().__init__()
        g = torch.tensor([[0.0, 1.0, 0.0], [1.0, 4.0, 1.0], [0.0, 1.0, 0.0]]) / 4
        rb = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 4
        self.register_buffer("kernel", torch.stack([rb, g, rb]).unsqueeze(1))
        self.register_buffer("gain", torch.tensor([1.9, 1.0, 1.6]).view(3, 1, 1))
        self.register_buffer("ccm", torch.tensor([[1.6, -0.4, -0.2], [-0.3, 1.5, -0.2], [0.0, -0.6, 1.6]]))
        self.to(torch.bfloat16)

    def forward(self, raw):
        h, w = raw.shape[-2:]
        row = torch.arange(h, device=raw.device).view(-1, 1) % 2
        col = torch.arange(w, device=raw.device).view(1, -1) % 2
        mask = torch.stack([(row == 0) & (col == 0), row != col, (row == 1) & (col == 1)])
        mosaic = (raw - 0.0625).clamp(min=0.0) / (1 - 0.0625) * mask
        rgb = F.conv2d(mosaic, self.kernel, padding=1, groups=3) * self.gain
        rgb = torch.einsum("oc,bchw->bohw", self.ccm, rgb.clamp(max=1.0))
        return rgb.clamp(1e-3, 1.0) ** (1 / 2.2)


def BilinearDemosaic_inputs():
    return (torch.rand(4, 1, 768, 1024, dtype=torch.bfloat16),)


def nv12_to_rgb(y, uv):
    """Limited-range 8-bit NV12 frames to normalised float16 RGB with nearest chroma upsampling."""
    luma = (y.to(torch.float16) - 16.0) * (1.0 / 219.0)
    chroma = (uv.to(torch.float16) - 128.0) * (1.0 / 224.0)
    chroma = chroma.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    u, v = chroma[..., 0], chroma[..., 1]
    r = luma + 1.5748 * v
    g = luma - 0.1873 * u - 0.4681 * v
    b = luma + 1.8556 * u
    return (torch.stack([r, g, b], dim=1).clamp(0, 1) - 0.5) / 0.25


def nv12_to_rgb_inputs():
    y = torch.randint(16, 236, (8, 720, 1280), dtype=torch.uint8)
    return y, torch.randint(16, 241, (8, 360, 640, 2), dtype=torch.uint8)


def block_dct_denoise(img, basis, threshold):
    """Denoise 8x8 blocks: DCT by matrix product, soft threshold that keeps DC, inverse DCT."""
    b, c, h, w = img.shape
    blocks = img.view(b, c, h // 8, 8, w // 8, 8).permute(0, 1, 2, 4, 3, 5)
    coef = basis @ blocks @ basis.t()
    shrunk = coef.sign() * (coef.abs() - threshold).clamp(min=0)
    out = basis.t() @ shrunk @ basis
    return out.permute(0, 1, 2, 4, 3, 5).reshape(b, c, h, w)


def block_dct_denoise_inputs():
    k = torch.arange(8.0)
    basis = torch.cos(torch.pi / 8 * (k[None, :] + 0.5) * k[:, None]) * 0.5
    basis[0] *= 0.5**0.5
    threshold = torch.full((8, 8), 0.1)
    threshold[0, 0] = 0.0
    return tuple(t.to(torch.bfloat16) for t in (torch.rand(8, 3, 512, 768), basis, threshold))


def haar_wavelet_shrink(img):
    """Two-level Haar transform by strided slicing, detail shrinkage, and reconstruction."""

    def forward_level(x):
        a, b = x[..., 0::2, 0::2], x[..., 0::2, 1::2]
        c, d = x[..., 1::2, 0::2], x[..., 1::2, 1::2]
        return (a + b + c + d) / 2, (a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2

    def inverse_level(ll, lh, hl, hh):
        bands = torch.stack([ll + lh + hl + hh, ll - lh + hl - hh, ll + lh - hl - hh, ll - lh - hl + hh], dim=2) / 2
        return F.pixel_shuffle(bands.flatten(1, 2), 2)

    ll1, *detail1 = forward_level(img)
    ll2, *detail2 = forward_level(ll1)
    ll1 = inverse_level(ll2, *[F.softshrink(d, 0.05) for d in detail2])
    return inverse_level(ll1, *[F.softshrink(d, 0.1) for d in detail1])


def haar_wavelet_shrink_inputs():
    return (torch.rand(8, 3, 512, 640, dtype=torch.bfloat16),)


class GaborEnergy(nn.Module):
    """Quadrature Gabor filter bank with 8 orientations, energy and divisive normalisation."""

    def __init__(self):
        super().__init__()
        t = torch.arange(-5.0, 6.0)
        y, x = torch.meshgrid(t, t, indexing="ij")
        theta = torch.arange(8).view(-1, 1, 1) * torch.pi / 8
        u, v = x * theta.cos() + y * theta.sin(), -x * theta.sin() + y * theta.cos()
        envelope = torch.exp(-(u**2 + 0.25 * v**2) / 8.0)
        envelope = envelope / envelope.sum(dim=(1, 2), keepdim=True)
        bank = torch.cat([envelope * torch.cos(2 * torch.pi * u / 5), envelope * torch.sin(2 * torch.pi * u / 5)])
        self.bank = nn.Parameter(bank.unsqueeze(1), requires_grad=False)
        self.to(torch.float16)

    def forward(self, img):
        even, odd = F.conv2d(img, self.bank, padding=5).chunk(2, dim=1)
        energy = torch.sqrt(even**2 + odd**2 + 1e-4)
        pooled = F.avg_pool2d(energy, 4)
        return pooled / (0.1 + pooled.sum(dim=1, keepdim=True))


def GaborEnergy_inputs():
    return (torch.rand(8, 1, 384, 384, dtype=torch.float16),)


# Audio


def log_mel_spectrogram(wave, window, cos_basis, sin_basis, mel):
    """Log-mel features: framing by unfold, window, DFT by matrix product, mel bank, dynamic range floor."""
    frames = wave.unfold(-1, 400, 160) * window
    re, im = frames @ cos_basis, frames @ sin_basis
    power = re.square() + im.square()
    log_mel = torch.log10(torch.clamp(power @ mel, min=1e-10))
    log_mel = torch.maximum(log_mel, log_mel.amax(dim=(1, 2), keepdim=True) - 8.0)
    return ((log_mel + 4.0) / 4.0).transpose(1, 2)


def log_mel_spectrogram_inputs():
    n, k = torch.arange(400.0)[:, None], torch.arange(201.0)[None, :]
    angle = 2 * torch.pi * n * k / 400
    return torch.randn(16, 80000) * 0.1, torch.hann_window(400), angle.cos(), angle.sin(), torch.rand(201, 80) * 0.02


def mfcc_with_deltas(log_mel, dct):
    """MFCC from log-mel by a DCT matrix, regression deltas of order one and two, mean-variance normalisation."""

    def delta(x):
        p = F.pad(x, (2, 2), mode="replicate")
        return (p[..., 3:-1] - p[..., 1:-3] + 2 * (p[..., 4:] - p[..., :-4])) / 10

    mfcc = torch.einsum("bmt,mk->bkt", log_mel, dct)
    d1 = delta(mfcc)
    features = torch.cat([mfcc, d1, delta(d1)], dim=1)
    mean = features.mean(dim=-1, keepdim=True)
    std = features.std(dim=-1, keepdim=True)
    return (features - mean) / (std + 1e-5)


def mfcc_with_deltas_inputs():
    m = torch.arange(80.0)
    dct = torch.cos(torch.pi / 80 * (m[:, None] + 0.5) * torch.arange(20.0)) * (2 / 80) ** 0.5
    return torch.randn(64, 80, 1001, dtype=torch.bfloat16), dct.to(torch.bfloat16)


def noise_gate(audio):
    """Noise gate: peak envelope by max pooling, smoothing, dB knee to a gain, make-up limiter."""
    peak = F.max_pool1d(audio.abs(), 129, stride=1, padding=64)
    env = F.avg_pool1d(peak, 65, stride=1, padding=32, count_include_pad=False)
    level = 20.0 * torch.log10(env + 1e-5)
    gain = torch.sigmoid((level + 8.0) * 0.5)
    gated = audio * gain * 1.5
    return torch.tanh(gated), gain


def noise_gate_inputs():
    envelope = torch.rand(16, 2, 1500).repeat_interleave(64, dim=-1)
    return ((torch.randn(16, 2, 96000) * 0.3 * envelope).to(torch.bfloat16),)


def autocorrelation_pitch(frames):
    """Normalised autocorrelation of frames at 32 lags by shifted products, parabolic peak sharpness."""
    n = frames.shape[-1]
    x = frames - frames.mean(dim=-1, keepdim=True)
    acf = torch.stack([(x[:, : n - lag] * x[:, lag:]).sum(dim=-1) for lag in range(32)], dim=-1)
    nacf = acf / (acf[:, :1] + 1e-6)
    curvature = nacf[:, 2:] - 2 * nacf[:, 1:-1] + nacf[:, :-2]
    return nacf, curvature.amin(dim=-1)


def autocorrelation_pitch_inputs():
    return (torch.randn(12000, 333),)


class ConvStft(nn.Module):
    """STFT by strided conv1d with a fixed Fourier basis, power compression, and a learned subband mask."""

    def __init__(self):
        super().__init__()
        k, n = torch.arange(257.0)[:, None], torch.arange(512.0)[None, :]
        angle = 2 * torch.pi * k * n / 512
        basis = torch.cat([angle.cos(), -angle.sin()]) * torch.hann_window(512) / 16
        self.register_buffer("basis", basis.unsqueeze(1))
        self.mask = nn.Conv1d(257, 257, 1)
        self.to(torch.bfloat16)

    def forward(self, wave):
        x = F.pad(wave.unsqueeze(1), (256, 256), mode="reflect")
        real, imag = F.conv1d(x, self.basis, stride=128).chunk(2, dim=1)
        mag = torch.sqrt(real * real + imag * imag + 1e-5)
        compressed = mag.pow(0.3)
        mask = torch.sigmoid(self.mask(compressed))
        scale = mask * compressed / mag
        return real * scale, imag * scale


def ConvStft_inputs():
    return (torch.randn(16, 48000, dtype=torch.bfloat16),)


def spectral_features(mag):
    """Spectral centroid, spread, skewness, flatness, crest and flux of a magnitude spectrogram."""
    f = torch.linspace(0.0, 1.0, mag.shape[1], device=mag.device).view(1, -1, 1)
    prob = mag / mag.sum(dim=1, keepdim=True).clamp(min=1e-8)
    centroid = (f * prob).sum(dim=1, keepdim=True)
    dev = f - centroid
    spread = torch.sqrt((dev**2 * prob).sum(dim=1, keepdim=True) + 1e-8)
    skew = (dev**3 * prob).sum(dim=1, keepdim=True) / spread**3
    flatness = torch.exp(torch.log(mag + 1e-6).mean(dim=1)) / mag.mean(dim=1)
    crest = mag.amax(dim=1) / mag.mean(dim=1)
    flux = F.relu(mag[..., 1:] - mag[..., :-1]).sum(dim=1)
    return torch.cat([centroid, spread, skew], dim=1), flatness, crest, flux


def spectral_features_inputs():
    return (torch.rand(32, 513, 500),)


def si_sdr_loss(estimate, target):
    """Negative scale-invariant signal-to-distortion ratio of separated sources."""
    estimate = estimate - estimate.mean(dim=-1, keepdim=True)
    target = target - target.mean(dim=-1, keepdim=True)
    dot = (estimate * target).sum(dim=-1, keepdim=True)
    energy = target.pow(2).sum(dim=-1, keepdim=True) + 1e-8
    projection = dot / energy * target
    noise = estimate - projection
    ratio = projection.pow(2).sum(dim=-1) / (noise.pow(2).sum(dim=-1) + 1e-8)
    return -10 * torch.log10(ratio + 1e-8)


def si_sdr_loss_inputs():
    target = torch.randn(32, 2, 64000)
    return target + 0.3 * torch.randn(32, 2, 64000), target


# Physics and scientific computing


def heat_equation_steps(u, alpha):
    """Four explicit steps of the heat equation with varying diffusivity and insulated walls."""
    for _ in range(4):
        p = F.pad(u, (1, 1, 1, 1), mode="replicate")
        lap = p[:, :, :-2, 1:-1] + p[:, :, 2:, 1:-1] + p[:, :, 1:-1, :-2] + p[:, :, 1:-1, 2:] - 4 * u
        u = u + 0.2 * alpha * lap
    return u


def heat_equation_steps_inputs():
    return torch.rand(4, 1, 1000, 1000, dtype=torch.float16), torch.rand(1, 1, 1000, 1000, dtype=torch.float16)


def lattice_boltzmann_step(f, velocity, weight):
    """D2Q9 lattice Boltzmann: BGK collision towards equilibrium and streaming by rolls."""
    rho = f.sum(dim=0)
    u = torch.einsum("qd,qhw->dhw", velocity, f) / rho
    cu = 3.0 * torch.einsum("qd,dhw->qhw", velocity, u)
    usq = 1.5 * (u * u).sum(dim=0)
    feq = weight.view(-1, 1, 1) * rho * (1.0 + cu + 0.5 * cu * cu - usq)
    f = f - (f - feq) / 0.6
    shifts = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
    streamed = torch.stack([torch.roll(f[q], s, dims=(0, 1)) for q, s in enumerate(shifts)])
    return streamed, rho, u


def lattice_boltzmann_step_inputs():
    velocity = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [-1, -1], [1, -1]]).float()
    weight = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)
    return weight.view(-1, 1, 1) * (1 + 0.1 * torch.rand(9, 800, 1000)), velocity, weight


def lennard_jones_energy(pos):
    """Per-particle Lennard-Jones energy with periodic minimum image and a shifted cutoff."""
    box, cutoff = 12.0, 2.5
    delta = pos[:, :, None, :] - pos[:, None, :, :]
    delta = delta - box * torch.round(delta / box)
    r2 = delta.square().sum(dim=-1)
    eye = torch.eye(pos.shape[1], dtype=torch.bool, device=pos.device)
    inside = (r2 < cutoff**2) & ~eye
    inv6 = r2.clamp(min=0.7).reciprocal().pow(3)
    shift = 4 * (cutoff**-12 - cutoff**-6)
    pair = torch.where(inside, 4 * (inv6 * inv6 - inv6) - shift, torch.zeros_like(r2))
    return 0.5 * pair.sum(dim=-1)


def lennard_jones_energy_inputs():
    return (torch.rand(8, 1000, 3) * 12.0,)


def nbody_accelerations(pos, mass):
    """Softened gravitational accelerations and potential of all pairs."""
    d = pos.unsqueeze(0) - pos.unsqueeze(1)
    r2 = (d**2).sum(dim=-1) + 0.05**2
    inv_r = torch.rsqrt(r2)
    acc = torch.einsum("ijd,ij,j->id", d, inv_r**3, mass)
    potential = -(mass * inv_r).sum(dim=-1)
    return acc, potential


def nbody_accelerations_inputs():
    return torch.randn(2500, 3), torch.rand(2500)


def kalman_filter_step(x, p, z, f, h, q, r):
    """Batched predict and update of a constant-velocity tracker with a closed-form 2x2 inverse."""
    x = x @ f.t()
    p = f @ p @ f.t() + q
    innovation = z - x @ h.t()
    ph = p @ h.t()
    s = h @ ph + r
    det = s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]
    top = torch.stack([s[:, 1, 1], -s[:, 0, 1]], dim=-1)
    bottom = torch.stack([-s[:, 1, 0], s[:, 0, 0]], dim=-1)
    s_inv = torch.stack([top, bottom], dim=-2) / det.view(-1, 1, 1)
    gain = ph @ s_inv
    x = x + torch.einsum("bij,bj->bi", gain, innovation)
    p = p - gain @ ph.transpose(-1, -2)
    distance = torch.einsum("bi,bij,bj->b", innovation, s_inv, innovation)
    return x, 0.5 * (p + p.transpose(-1, -2)), -0.5 * (distance + det.log())


def kalman_filter_step_inputs():
    f = torch.eye(4) + 0.1 * torch.diag(torch.ones(2), 2)
    a = torch.randn(50000, 4, 4) * 0.3
    p = a @ a.transpose(1, 2) + torch.eye(4)
    return (
        torch.randn(50000, 4),
        p,
        torch.randn(50000, 2),
        f,
        torch.eye(2, 4),
        0.01 * torch.eye(4),
        0.1 * torch.eye(2),
    )


def particle_filter_weights(particles, landmarks, ranges, log_weight):
    """Range-only particle filter: log-likelihood, normalised weights, effective size, estimate, resampling CDF."""
    diff = particles[:, :, None, :2] - landmarks
    predicted = torch.sqrt((diff**2).sum(dim=-1) + 1e-6)
    error = (predicted - ranges[:, None, :]) / 0.5
    log_w = log_weight - 0.5 * (error**2).sum(dim=-1)
    w = torch.softmax(log_w, dim=-1)
    mean = torch.einsum("bn,bnd->bd", w, particles)
    return w, 1.0 / (w * w).sum(dim=-1), mean, torch.cumsum(w, dim=-1)


def particle_filter_weights_inputs():
    return torch.randn(64, 5000, 3), torch.randn(12, 2) * 3, torch.rand(64, 12) * 4, torch.zeros(64, 5000)


class RungeKuttaMlp(nn.Module):
    """Two classical RK4 steps of a neural ODE whose right-hand side is a small MLP."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(65, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
        self.to(torch.bfloat16)

    def rhs(self, t, y):
        time = torch.full_like(y[:, :1], t)
        return self.net(torch.cat([y, time], dim=-1))

    def forward(self, y):
        h = 0.25
        for i in range(2):
            t = i * h
            k1 = self.rhs(t, y)
            k2 = self.rhs(t + h / 2, y + h / 2 * k1)
            k3 = self.rhs(t + h / 2, y + h / 2 * k2)
            k4 = self.rhs(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y


def RungeKuttaMlp_inputs():
    return (torch.randn(8192, 64, dtype=torch.bfloat16),)


def black_scholes_greeks(spot, strike, time, vol):
    """European call and put prices with delta, gamma, vega and theta in closed form."""
    rate = 0.03
    sqrt_t = torch.sqrt(time)
    d1 = (torch.log(spot / strike) + (rate + 0.5 * vol**2) * time) / (vol * sqrt_t)
    d2 = d1 - vol * sqrt_t
    cdf1 = 0.5 * (1 + torch.erf(d1 / 2**0.5))
    cdf2 = 0.5 * (1 + torch.erf(d2 / 2**0.5))
    pdf1 = torch.exp(-0.5 * d1 * d1) / (2 * torch.pi) ** 0.5
    discounted = strike * torch.exp(-rate * time)
    call = spot * cdf1 - discounted * cdf2
    put = call - spot + discounted
    gamma = pdf1 / (spot * vol * sqrt_t)
    vega = spot * pdf1 * sqrt_t
    theta = -spot * pdf1 * vol / (2 * sqrt_t) - rate * discounted * cdf2
    return call, put, cdf1, gamma, vega, theta


def black_scholes_greeks_inputs():
    n = 2000003
    return torch.rand(n) * 50 + 75, torch.rand(n) * 50 + 75, torch.rand(n) * 2 + 0.1, torch.rand(n) * 0.4 + 0.1


def sir_metapopulation_step(s, i, r, mobility, beta, gamma):
    """One step of an SIR model over regions coupled by a mobility matrix, for a batch of scenarios."""
    n = s + i + r
    pressure = (i / n) @ mobility.t()
    infected = torch.minimum(beta * s * pressure, s)
    recovered = gamma * i
    s_new, i_new, r_new = s - infected, i + infected - recovered, r + recovered
    return s_new, i_new, r_new, (infected / (recovered + 1e-2)).mean(dim=-1)


def sir_metapopulation_step_inputs():
    def bf(x):
        return x.to(torch.bfloat16)

    s, i, r = (bf(torch.rand(3000, 1000) * k + 0.05) for k in (1.0, 0.2, 0.3))
    mobility = bf(torch.softmax(torch.randn(1000, 1000), dim=-1))
    return s, i, r, mobility, bf(torch.rand(3000, 1) * 0.5 + 0.1), bf(torch.rand(3000, 1) * 0.2 + 0.05)


def burgers_muscl_step(u):
    """Finite-volume step of Burgers' equation with minmod slopes and the Rusanov flux."""
    left, right = torch.roll(u, 1, dims=-1), torch.roll(u, -1, dims=-1)
    a, b = u - left, right - u
    slope = torch.where(a * b > 0, torch.sign(a) * torch.minimum(a.abs(), b.abs()), torch.zeros_like(u))
    ul = u + 0.5 * slope
    ur = torch.roll(u - 0.5 * slope, -1, dims=-1)
    speed = torch.maximum(ul.abs(), ur.abs())
    flux = 0.25 * (ul**2 + ur**2) - 0.5 * speed * (ur - ul)
    return u - 0.2 * (flux - torch.roll(flux, 1, dims=-1))


def burgers_muscl_step_inputs():
    return (torch.randn(1000, 4096, dtype=torch.bfloat16),)


# Statistics and classical machine learning


def gmm_e_step(x, mean, log_var, logit):
    """E-step of a diagonal Gaussian mixture: responsibilities and log-likelihood."""
    precision = torch.exp(-log_var)
    quad = (x**2) @ precision.t() - 2 * x @ (mean * precision).t() + (mean**2 * precision).sum(dim=-1)
    log_prob = -0.5 * (quad + log_var.sum(dim=-1) + x.shape[-1] * 1.8378770664)
    joint = log_prob + torch.log_softmax(logit, dim=-1)
    log_norm = torch.logsumexp(joint, dim=-1, keepdim=True)
    return torch.exp(joint - log_norm), log_norm.squeeze(-1)


def gmm_e_step_inputs():
    return torch.randn(50000, 32), torch.randn(77, 32), torch.randn(77, 32) * 0.2, torch.randn(77)


def kernel_regression(query, keys, values, log_scale):
    """Nadaraya-Watson regression with an RBF kernel of learned per-dimension bandwidth."""
    scale = torch.exp(-log_scale)
    q, k = query * scale, keys * scale
    dist = q.square().sum(dim=-1, keepdim=True) + k.square().sum(dim=-1) - 2 * torch.mm(q, k.t())
    weight = torch.exp(-0.5 * dist.clamp(min=0))
    return torch.mm(weight, values) / (weight.sum(dim=-1, keepdim=True) + 1e-3)


def kernel_regression_inputs():
    q, k, v = torch.randn(4000, 16), torch.randn(3000, 16), torch.randn(3000, 8)
    return tuple(t.to(torch.bfloat16) for t in (q, k, v, torch.full((16,), 1.0)))


def quantile_loss(pred, target, weight):
    """Pinball loss over nine quantiles with a non-crossing penalty, weighted by horizon."""
    q = torch.linspace(0.1, 0.9, 9, device=pred.device, dtype=pred.dtype)
    error = target.unsqueeze(-1) - pred
    pinball = torch.maximum(q * error, (q - 1) * error).sum(dim=-1)
    crossing = F.relu(pred[..., :-1] - pred[..., 1:]).sum(dim=-1)
    return ((pinball + 0.1 * crossing) * weight).mean(dim=-1)


def quantile_loss_inputs():
    pred, target, weight = torch.randn(8000, 96, 9), torch.randn(8000, 96), torch.rand(96)
    return tuple(t.to(torch.bfloat16) for t in (pred, target, weight))


def crps_ensemble_loss(ensemble, obs, area):
    """Fair CRPS of an ensemble forecast by all pairs of members, averaged with area weights."""
    m = ensemble.shape[1]
    skill = (ensemble - obs.unsqueeze(1)).abs().mean(dim=1)
    spread = (ensemble.unsqueeze(1) - ensemble.unsqueeze(2)).abs().sum(dim=(1, 2)) / (2 * m * (m - 1))
    crps = skill - spread
    return (crps * area.view(1, -1, 1)).sum(dim=(-2, -1)) / (area.sum() * crps.shape[-1])


def crps_ensemble_loss_inputs():
    shapes = (4, 10, 121, 240), (4, 121, 240)
    area = torch.linspace(-1.5, 1.5, 121).cos().to(torch.bfloat16)
    return (*(torch.randn(s, dtype=torch.bfloat16) for s in shapes), area)


def mixture_density_nll(logit, mean, log_sigma, target):
    """Negative log-likelihood of a mixture density network head with a clamp on the scales."""
    log_pi = F.log_softmax(logit, dim=-1)
    log_sigma = log_sigma.clamp(-4.0, 4.0)
    z = (target.unsqueeze(1) - mean) * torch.exp(-log_sigma)
    log_prob = (-0.5 * z * z - log_sigma - 0.9189385332).sum(dim=-1)
    return -torch.logsumexp(log_pi + log_prob, dim=-1)


def mixture_density_nll_inputs():
    shapes = ((30000, 20), (30000, 20, 7), (30000, 20, 7), (30000, 7))
    return tuple(torch.randn(s, dtype=torch.bfloat16) for s in shapes)


def confusion_metrics(pred, label):
    """Confusion matrix by one-hot products, with precision, recall, F1 and intersection over union."""
    classes = 49
    p = F.one_hot(pred, classes).to(torch.bfloat16)
    t = F.one_hot(label, classes).to(torch.bfloat16)
    matrix = torch.einsum("bni,bnj->bij", t, p).float()
    tp = matrix.diagonal(dim1=-2, dim2=-1)
    precision = tp / matrix.sum(dim=-2).clamp(min=1)
    recall = tp / matrix.sum(dim=-1).clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-6)
    iou = tp / (matrix.sum(dim=-1) + matrix.sum(dim=-2) - tp).clamp(min=1)
    return matrix, f1, iou.mean(dim=-1)


def confusion_metrics_inputs():
    return torch.randint(0, 49, (64, 5000)), torch.randint(0, 49, (64, 5000))


def pairwise_auc(score, label):
    """Area under the ROC curve per task by comparing all pairs, counting ties as one half."""
    greater = (score[:, :, None] > score[:, None, :]).float()
    equal = (score[:, :, None] == score[:, None, :]).float()
    pairs = label[:, :, None] & ~label[:, None, :]
    wins = ((greater + 0.5 * equal) * pairs).sum(dim=(1, 2))
    return wins / pairs.sum(dim=(1, 2)).clamp(min=1)


def pairwise_auc_inputs():
    return torch.randn(12, 1500, dtype=torch.bfloat16), torch.rand(12, 1500) < 0.3


def mahalanobis_scores(features, mean, precision):
    """Patch-wise Mahalanobis anomaly map with a precision matrix per position, normalised per image."""
    b, _, h, w = features.shape
    delta = features.flatten(2) - mean
    dist = torch.einsum("bcn,ncd,bdn->bn", delta, precision, delta).clamp(min=0)
    score = torch.sqrt(dist.float() + 1e-6).view(b, h, w)
    lo, hi = score.amin(dim=(1, 2), keepdim=True), score.amax(dim=(1, 2), keepdim=True)
    return (score - lo) / (hi - lo + 1e-6), hi.flatten()


def mahalanobis_scores_inputs():
    a = torch.randn(784, 100, 8)
    precision = a @ a.transpose(1, 2) / 8 + torch.eye(100)
    features, mean = torch.randn(32, 100, 28, 28), torch.randn(100, 784) * 0.1
    return features.to(torch.bfloat16), mean.to(torch.bfloat16), precision.to(torch.bfloat16)


def correlation_matrix(x):
    """Pearson correlation of many series per group, shrunk towards identity, Fisher z transformed off the diagonal."""
    xc = x - x.mean(dim=-1, keepdim=True)
    xn = xc * torch.rsqrt(xc.square().sum(dim=-1, keepdim=True) + 1e-6)
    corr = 0.9 * torch.bmm(xn, xn.transpose(1, 2))
    eye = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    z = torch.atanh(corr.masked_fill(eye, 0.0).clamp(-0.99, 0.99))
    return z, z.abs().mean(dim=-1)


def correlation_matrix_inputs():
    return (torch.randn(16, 500, 333, dtype=torch.bfloat16),)


def pagerank_steps(adjacency, teleport):
    """Three personalised PageRank iterations on a dense adjacency with dangling nodes handled."""
    degree = adjacency.sum(dim=-1, keepdim=True)
    dangling = (degree == 0).to(teleport.dtype).squeeze(-1)
    transition = adjacency / degree.clamp(min=1)
    rank = teleport
    for _ in range(3):
        sink = (rank * dangling).sum(dim=-1, keepdim=True)
        rank = 0.85 * (rank @ transition + sink * teleport) + 0.15 * teleport
    return rank, (rank - teleport).abs().sum(dim=-1)


def pagerank_steps_inputs():
    adjacency = (torch.rand(3000, 3000) < 0.01).float()
    adjacency[::77] = 0
    return adjacency, torch.softmax(torch.randn(32, 3000), dim=-1)


def multiclass_hinge_loss(x, weight, bias, label):
    """Crammer-Singer squared hinge of a linear classifier with a sum over violating classes."""
    score = F.linear(x, weight, bias)
    correct = score.gather(1, label.unsqueeze(1))
    margin = F.relu(score - correct + 1.0)
    mask = F.one_hot(label, score.shape[1]).to(score.dtype)
    return (margin.square() * (1 - mask)).mean(dim=1)


def multiclass_hinge_loss_inputs():
    x, w = torch.randn(8192, 512), torch.randn(1000, 512) * 0.04
    bf = torch.bfloat16
    return x.to(bf), w.to(bf), torch.zeros(1000, dtype=bf), torch.randint(0, 1000, (8192,))


# Graphs


class DenseGcn(nn.Module):
    """Two-layer GCN with symmetric normalisation of a batch of dense adjacency matrices and masked mean pooling."""

    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(64, 128, bias=False)
        self.lin2 = nn.Linear(128, 128, bias=False)
        self.norm = nn.LayerNorm(128)
        self.to(torch.bfloat16)

    def forward(self, x, adj, mask):
        adj = adj + torch.eye(adj.shape[-1], device=adj.device, dtype=adj.dtype)
        d = adj.sum(dim=-1).clamp(min=1).rsqrt()
        a = d.unsqueeze(-1) * adj * d.unsqueeze(-2)
        h = F.relu(self.norm(a @ self.lin1(x)))
        h = h + F.relu(a @ self.lin2(h))
        m = mask.unsqueeze(-1).to(h.dtype)
        return (h * m).sum(dim=1) / m.sum(dim=1).clamp(min=1)


def DenseGcn_inputs():
    x = torch.randn(64, 200, 64, dtype=torch.bfloat16)
    adj = (torch.rand(64, 200, 200) < 0.05).to(torch.bfloat16)
    return x, adj, torch.rand(64, 200) < 0.9


class DenseGat(nn.Module):
    """Graph attention layer on a dense adjacency mask with additive scores and four heads."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(128, 4 * 32, bias=False)
        self.att_src = nn.Parameter(torch.randn(4, 32) * 0.1)
        self.att_dst = nn.Parameter(torch.randn(4, 32) * 0.1)
        self.to(torch.bfloat16)

    def forward(self, x, adj):
        n = x.shape[0]
        h = self.lin(x).view(n, 4, 32)
        src = (h * self.att_src).sum(dim=-1)
        dst = (h * self.att_dst).sum(dim=-1)
        e = F.leaky_relu(dst.t().unsqueeze(2) + src.t().unsqueeze(1), 0.2)
        e = e.masked_fill(~adj, -1e9)
        alpha = torch.softmax(e, dim=-1)
        out = torch.einsum("hij,jhd->ihd", alpha, h)
        return F.elu(out.reshape(n, 128)) + x


def DenseGat_inputs():
    adj = (torch.rand(2708, 2708) < 0.01) | torch.eye(2708, dtype=torch.bool)
    return torch.randn(2708, 128, dtype=torch.bfloat16), adj


def edge_softmax_aggregate(score, value, src, dst):
    """Softmax of edge scores over incoming edges with scatter_reduce, then weighted index_add of messages."""
    n, heads = value.shape[0], value.shape[1]
    index = dst.unsqueeze(-1).expand(-1, heads)
    peak = torch.full((n, heads), -1e9, device=score.device, dtype=score.dtype)
    peak = peak.scatter_reduce(0, index, score, reduce="amax", include_self=True)
    ex = torch.exp(score - peak[dst])
    total = torch.zeros(n, heads, device=score.device, dtype=score.dtype).index_add(0, dst, ex)
    alpha = ex / (total[dst] + 1e-16)
    message = alpha.unsqueeze(-1) * value[src]
    return torch.zeros_like(value).index_add(0, dst, message), alpha


def edge_softmax_aggregate_inputs():
    src, dst = torch.randint(0, 10000, (2, 120000)).unbind(0)
    return torch.randn(120000, 4), torch.randn(10000, 4, 16), src, dst


class EgnnLayer(nn.Module):
    """E(n)-equivariant layer over all pairs: messages from distances, coordinate update, feature update."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * 64 + 1, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.coord = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1, bias=False))
        self.gate = nn.Linear(64, 1)
        self.node = nn.Sequential(nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 64))
        self.to(torch.bfloat16)

    def forward(self, h, x):
        b, n, c = h.shape
        rel = x.unsqueeze(2) - x.unsqueeze(1)
        d2 = rel.square().sum(dim=-1, keepdim=True)
        hi = h.unsqueeze(2).expand(b, n, n, c)
        hj = h.unsqueeze(1).expand(b, n, n, c)
        m = self.edge(torch.cat([hi, hj, d2], dim=-1))
        m = m * torch.sigmoid(self.gate(m))
        x = x + (rel / (torch.sqrt(d2 + 1e-8) + 1) * self.coord(m)).mean(dim=2)
        h = h + self.node(torch.cat([h, m.sum(dim=2) / n], dim=-1))
        return h, x


def EgnnLayer_inputs():
    return torch.randn(32, 49, 64, dtype=torch.bfloat16), torch.randn(32, 49, 3, dtype=torch.bfloat16)


class GinBlock(nn.Module):
    """Graph isomorphism layer with edge features: gather, ReLU messages, index_add, MLP and residual."""

    def __init__(self):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.edge = nn.Linear(16, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 128))
        self.to(torch.bfloat16)

    def forward(self, x, edge_attr, src, dst):
        message = F.relu(x[src] + self.edge(edge_attr))
        agg = torch.zeros_like(x).index_add(0, dst, message)
        return F.relu(self.mlp((1 + self.eps) * x + agg)) + x


def GinBlock_inputs():
    src, dst = torch.randint(0, 12000, (50000,)), torch.randint(0, 12000, (50000,))
    x, edge_attr = torch.randn(12000, 128), torch.randn(50000, 16)
    return x.to(torch.bfloat16), edge_attr.to(torch.bfloat16), src, dst


# Geometry and vision


def quaternion_rotate_points(quat, points, translation):
    """Rigid transform of point clouds by unit quaternions using two cross products."""
    q = F.normalize(quat, dim=-1)
    w, v = q[:, None, :1], q[:, None, 1:].expand_as(points)
    t = 2.0 * torch.cross(v, points, dim=-1)
    return points + w * t + torch.cross(v, t, dim=-1) + translation.unsqueeze(1)


def quaternion_rotate_points_inputs():
    bf = torch.bfloat16
    return torch.randn(256, 4, dtype=bf), torch.randn(256, 8192, 3, dtype=bf), torch.randn(256, 3, dtype=bf)


def so3_exp_map(omega):
    """Rodrigues' formula from axis-angle vectors to rotation matrices with a small-angle series."""
    theta2 = omega.square().sum(dim=-1)
    small = theta2 < 1e-4
    safe2 = torch.where(small, torch.ones_like(theta2), theta2)
    theta = safe2.sqrt()
    a = torch.where(small, 1 - theta2 / 6, torch.sin(theta) / theta)
    b = torch.where(small, 0.5 - theta2 / 24, (1 - torch.cos(theta)) / safe2)
    x, y, z = omega.unbind(dim=-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(*omega.shape[:-1], 3, 3)
    eye = torch.eye(3, device=omega.device, dtype=omega.dtype)
    return eye + a[..., None, None] * skew + b[..., None, None] * (skew @ skew)


def so3_exp_map_inputs():
    return (torch.randn(4000, 52, 3),)


def volume_render(sigma, rgb, z, background):
    """NeRF compositing: alpha from density, transmittance by cumprod, colour, depth and opacity."""
    delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 0.1)], dim=-1)
    alpha = 1.0 - torch.exp(-F.softplus(sigma - 1.0) * delta)
    ones = torch.ones_like(alpha[:, :1])
    trans = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], dim=-1), dim=-1)[:, :-1]
    weight = alpha * trans
    acc = weight.sum(dim=-1, keepdim=True)
    color = (weight.unsqueeze(-1) * torch.sigmoid(rgb)).sum(dim=-2) + (1 - acc) * background
    return color, (weight * z).sum(dim=-1), acc


def volume_render_inputs():
    z = torch.linspace(2.0, 6.0, 96).expand(16384, 96) + torch.rand(16384, 96) * 0.04
    return torch.randn(16384, 96), torch.randn(16384, 96, 3), z, torch.rand(3)


def integrated_positional_encoding(mean, var, direction):
    """Integrated positional encoding of Gaussians along rays, with encoded view directions appended."""
    freq = 2.0 ** torch.arange(8, device=mean.device, dtype=mean.dtype)
    scaled = (mean.unsqueeze(-2) * freq[:, None]).flatten(-2)
    damp = torch.exp(-0.5 * (var.unsqueeze(-2) * (freq * freq)[:, None]).flatten(-2))
    position = torch.cat([damp * torch.sin(scaled), damp * torch.cos(scaled)], dim=-1)
    view = direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    view = torch.cat([view, torch.sin(view), torch.cos(view), torch.sin(2 * view), torch.cos(2 * view)], dim=-1)
    return torch.cat([position, view.unsqueeze(1).expand(-1, mean.shape[1], -1)], dim=-1)


def integrated_positional_encoding_inputs():
    return torch.randn(4096, 64, 3), torch.rand(4096, 64, 3) * 0.1, torch.randn(4096, 3)


def giou_loss(pred, target):
    """Generalised IoU loss of aligned boxes given as centre and log-size offsets."""

    def corners(b):
        half = 0.5 * torch.exp(b[..., 2:].clamp(max=4.0))
        return b[..., :2] - half, b[..., :2] + half

    (p0, p1), (t0, t1) = corners(pred), corners(target)
    inter = (torch.minimum(p1, t1) - torch.maximum(p0, t0)).clamp(min=0).prod(dim=-1)
    union = (p1 - p0).prod(dim=-1) + (t1 - t0).prod(dim=-1) - inter
    hull = (torch.maximum(p1, t1) - torch.minimum(p0, t0)).prod(dim=-1)
    return 1 - inter / (union + 1e-6) + (hull - union) / (hull + 1e-6)


def giou_loss_inputs():
    bf = torch.bfloat16
    return torch.randn(64, 8400, 4, dtype=bf) * 0.5, torch.randn(64, 8400, 4, dtype=bf) * 0.5


def matrix_nms_scores(boxes, scores):
    """Matrix NMS: pairwise IoU of score-sorted boxes and Gaussian decay without suppression loops."""
    area = (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1)
    lt = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    rb = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(dim=-1)
    iou = (inter / (area[:, :, None] + area[:, None, :] - inter)).triu(diagonal=1)
    compensate = iou.amax(dim=1).unsqueeze(-1)
    decay = torch.exp(-2.0 * (iou**2 - compensate**2)).amin(dim=1)
    return scores * decay.clamp(max=1.0)


def matrix_nms_scores_inputs():
    xy, wh = torch.rand(8, 1000, 2), torch.rand(8, 1000, 2) * 0.3 + 0.05
    scores = torch.rand(8, 1000).sort(dim=-1, descending=True).values
    return torch.cat([xy, xy + wh], dim=-1).to(torch.float16), scores.to(torch.float16)


def focal_tversky_loss(logits, target):
    """Focal Tversky and Dice loss of multi-class segmentation volumes."""
    prob = torch.softmax(logits, dim=1)
    onehot = F.one_hot(target, logits.shape[1]).permute(0, 4, 1, 2, 3).to(prob.dtype)
    dims = (2, 3, 4)
    tp = (prob * onehot).sum(dim=dims)
    fp = (prob * (1 - onehot)).sum(dim=dims)
    fn = ((1 - prob) * onehot).sum(dim=dims)
    tversky = (tp + 1.0) / (tp + 0.3 * fp + 0.7 * fn + 1.0)
    dice = (2 * tp + 1.0) / (2 * tp + fp + fn + 1.0)
    return (1 - tversky).pow(0.75).mean(dim=1) + (1 - dice).mean(dim=1)


def focal_tversky_loss_inputs():
    return torch.randn(2, 5, 77, 96, 96, dtype=torch.bfloat16), torch.randint(0, 5, (2, 77, 96, 96))


def chamfer_loss(a, b):
    """Symmetric chamfer distance of point clouds with a smooth robust penalty."""
    d = (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(dim=-1)
    forward, backward = d.amin(dim=2), d.amin(dim=1)
    robust_f = torch.sqrt(forward + 1e-3)
    robust_b = torch.sqrt(backward + 1e-3)
    return robust_f.mean(dim=1) + robust_b.mean(dim=1)


def chamfer_loss_inputs():
    return torch.randn(8, 1024, 3, dtype=torch.bfloat16), torch.randn(8, 1000, 3, dtype=torch.bfloat16)


def photometric_flow_loss(img1, img2, flow):
    """Charbonnier photometric loss of a flow-warped image with edge-aware smoothness."""
    h, w = img1.shape[-2:]
    gy, gx = torch.meshgrid(
        torch.linspace(-1, 1, h, device=flow.device), torch.linspace(-1, 1, w, device=flow.device), indexing="ij"
    )
    grid = torch.stack([gx + flow[:, 0] * (2 / (w - 1)), gy + flow[:, 1] * (2 / (h - 1))], dim=-1)
    warped = F.grid_sample(img2, grid, mode="bilinear", padding_mode="border", align_corners=True)
    data = torch.sqrt((warped - img1).square() + 1e-4).mean(dim=(1, 2, 3))
    edge_x = torch.exp(-10 * (img1[..., 1:] - img1[..., :-1]).square().mean(dim=1, keepdim=True))
    edge_y = torch.exp(-10 * (img1[..., 1:, :] - img1[..., :-1, :]).square().mean(dim=1, keepdim=True))
    smooth_x = (edge_x * F.huber_loss(flow[..., 1:], flow[..., :-1], reduction="none")).mean(dim=(1, 2, 3))
    smooth_y = (edge_y * F.huber_loss(flow[..., 1:, :], flow[..., :-1, :], reduction="none")).mean(dim=(1, 2, 3))
    return data + 0.1 * (smooth_x + smooth_y)


def photometric_flow_loss_inputs():
    return torch.rand(4, 3, 320, 448), torch.rand(4, 3, 320, 448), torch.randn(4, 2, 320, 448) * 3


def local_correlation_volume(f1, f2):
    """PWC-style cost volume over 7x7 displacements of normalised features, leaky rectified."""
    h, w = f1.shape[-2:]
    f1, f2 = F.normalize(f1, dim=1), F.normalize(f2, dim=1)
    padded = F.pad(f2, (3, 3, 3, 3))
    cost = [(f1 * padded[:, :, i : i + h, j : j + w]).sum(dim=1) for i in range(7) for j in range(7)]
    return F.leaky_relu(torch.stack(cost, dim=1), 0.1)


def local_correlation_volume_inputs():
    return torch.randn(4, 64, 96, 128, dtype=torch.bfloat16), torch.randn(4, 64, 96, 128, dtype=torch.bfloat16)


class SubPixelNet(nn.Module):
    """ESPCN-like super-resolution with a residual block, pixel shuffle and a bilinear skip."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 48, 5, padding=2)
        self.body1 = nn.Conv2d(48, 48, 3, padding=1)
        self.body2 = nn.Conv2d(48, 48, 3, padding=1)
        self.act = nn.PReLU(48)
        self.tail = nn.Conv2d(48, 3 * 4, 3, padding=1)
        self.to(torch.bfloat16)

    def forward(self, x):
        h = self.act(self.head(x))
        h = h + 0.2 * self.body2(F.relu(self.body1(h)))
        up = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.sigmoid(F.pixel_shuffle(self.tail(h), 2) + up)


def SubPixelNet_inputs():
    return (torch.rand(4, 3, 200, 200, dtype=torch.bfloat16),)
