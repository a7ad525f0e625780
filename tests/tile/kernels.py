"""Hand-written kernels that the tests of the tile IR share."""

SOFTMAX = """
kernel softmax(R, C)
  dim i = R
  dim j = C
  in x: f32[R, C]
  out y: f32[R, C]
  grid i:3
    alloc m: f32[i:3] tile
    alloc mn: f32[i:3] tile
    alloc t: f32[i:3] tile
    fill m = -inf
    fill t = 0.0
    for j:4
      mn = m[i]
      mn max= over j: x[i, j]
      t = t[i] * exp(where(m[i] == -inf, 0.0, m[i]) - where(mn[i] == -inf, 0.0, mn[i]))
      t sum= over j: exp(x[i, j] - where(mn[i] == -inf, 0.0, mn[i]))
      m = mn[i]
    for j:4
      store y[i, j] over i, j = exp(x[i, j] - m[i]) / t[i]
"""

ATTENTION = """
kernel attention(S)
  dim b = 2
  dim h = 3
  dim i = S
  dim j = S
  dim d = 8
  dim e = 8
  in q: f32[2, 3, S, 8] unit 3
  in k: f32[2, 3, S, 8]
  in v: f32[2, 3, S, 8]
  out o: f32[2, 3, S, 8]
  grid b:1 h:1 i:4
    alloc qt: f32[d:8, i:4] tile
    qt[d, i] = q[b, h, i, d]
    alloc m: f32[i:4] tile
    alloc t: f32[i:4] tile
    alloc acc: f32[i:4, e:8] tile
    fill m = -inf
    fill t = 0.0
    fill acc = 0.0
    for j:3 in 0 .. minimum(size(j), tile_stop(i))
      alloc s: f32[j:3, i:4] tile
      alloc mn: f32[i:4] tile
      s[j, i] = gemm over d: k[b, h, j, d] * qt[d, i]
      s[j, i] = where(j <= i, s[j, i] * 0.125, -inf)
      mn = m[i]
      mn max= over j: s[j, i]
      t = t[i] * exp(m[i] - mn[i])
      acc = acc[i, e] * exp(m[i] - mn[i])
      m = mn[i]
      s = exp(s[j, i] - m[i])
      t sum= over j: s[j, i]
      acc gemm= over j: s[j, i] * v[b, h, j, e]
    store o[b, h, i, e] over i, e = acc[i, e] / t[i]
"""

TOPK = """
kernel routing(N)
  dim i = N
  dim l = 6
  dim j = 10
  dim r = 3
  in x: f32[N, 6]
  in w: f32[6, 10]
  out y: f32[N, 3]
  out at: i64[N, 3]
  grid i:2
    alloc best: f32[i:2, r:3] tile
    alloc where_: i64[i:2, r:3] tile
    fill best = -inf
    fill where_ = -1
    for j:4
      alloc s: f32[i:2, j:4] tile
      s = gemm over l: x[i, l] * w[l, j]
      best[i, r], where_[i, r] topk= over j: s[i, j] -> j
    store y[i, r] over i, r = best[i, r]
    store at[i, r] over i, r = where_[i, r]
"""

#: embedding bag with a panel and an indirect load, bf16 in, e4m3 out
GATHER = """
kernel bag(N)
  dim i = N
  dim c = 5
  in ids: i64[N]
  in table: bf16[7, 5]
  out y: e4m3[N, 5]
  out top: f32[]
  grid
    alloc p: bf16[i:size(i), c:5] panel
    alloc m: f32[] tile
    for i:4
      p[i, c] = table[ids[i], c]
    m = max over i, c: p[i, c]
    for i:3 in 0 .. size(i)
      store y[i, c] over i, c = e4m3(p[i, c] * 0.5)
    store top[] over = m
"""

ALL = {"softmax": SOFTMAX, "attention": ATTENTION, "routing": TOPK, "bag": GATHER}
