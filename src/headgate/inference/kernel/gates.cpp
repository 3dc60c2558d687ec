// Gate networks, what an exit reads, and a pooling at inference, so that small operators do not cost more than what
// they save.
// Plain C ABI, no headers of torch or Python.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(HEADGATE_CLONES)
// chosen from outside
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HEADGATE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HEADGATE_CLONES
#endif

namespace {

constexpr int64_t ROWS = 16;  // planes that a thread takes at a time

// The sum of a plane, in many running sums: quick, and closer to the truth than one.
template <int SUMS>
inline __attribute__((always_inline)) float sum_in(const float* x, int64_t count) {
  float sums[SUMS] = {};
  int64_t p = 0;
  for (; p + SUMS <= count; p += SUMS)
    for (int lane = 0; lane < SUMS; ++lane) sums[lane] += x[p + lane];
  for (int lane = 0; p < count; ++p, ++lane) sums[lane] += x[p];
  for (int step = SUMS / 2; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  return sums[0];
}

// The means of planes [first, last), few running sums for small ones: they have to be added up in the end, too.
HEADGATE_CLONES void means_of(const float* x, int64_t first, int64_t last, int64_t plane, float* means) {
  const float share = 1.0f / static_cast<float>(plane);
  if (plane == 1) {
    std::memcpy(means + first, x + first, sizeof(float) * (last - first));
  } else if (plane < 512) {
    for (int64_t row = first; row < last; ++row) means[row] = sum_in<16>(x + row * plane, plane) * share;
  } else {
    for (int64_t row = first; row < last; ++row) means[row] = sum_in<64>(x + row * plane, plane) * share;
  }
}

// logits = W hidden + b, with W as (hidden, gates): many gates at a time, their sums in registers.
HEADGATE_CLONES void head(const float* w, const float* b, const float* hidden, int64_t length, int64_t gates,
                          float* logits) {
  constexpr int TOGETHER = 64;
  int64_t g = 0;
  for (; g + TOGETHER <= gates; g += TOGETHER) {
    float sums[TOGETHER];
    for (int lane = 0; lane < TOGETHER; ++lane) sums[lane] = b[g + lane];
    for (int64_t h = 0; h < length; ++h)
      for (int lane = 0; lane < TOGETHER; ++lane) sums[lane] += w[h * gates + g + lane] * hidden[h];
    std::memcpy(logits + g, sums, sizeof(sums));
  }
  for (; g < gates; ++g) {
    float sum = b[g];
    for (int64_t h = 0; h < length; ++h) sum += w[h * gates + g] * hidden[h];
    logits[g] = sum;
  }
}

// Open where the logit is above the threshold; whether any is.
HEADGATE_CLONES bool decide(const float* logits, int64_t gates, float threshold, uint8_t* mask) {
  int any = 0;
  for (int64_t g = 0; g < gates; ++g) {
    const int open = logits[g] > threshold;
    mask[g] = static_cast<uint8_t>(open);
    any |= open;
  }
  return any != 0;
}

HEADGATE_CLONES float dot(const float* a, const float* b, int64_t count) {
  float sums[32] = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
    for (int lane = 0; lane < 32; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += a[i] * b[i];
  for (int step = 16; step; step /= 2)
    for (int lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  return sums[0];
}

// Of one plane: its mean, and relu(scale x + shift) averaged over tiles. `lines` has room for two rows. Rows and columns
// that do not fill a tile are in the mean only.
HEADGATE_CLONES float read_plane(const float* x, float scale, float shift, int64_t height, int64_t width,
                                 int64_t tile_h, int64_t tile_w, float* lines, float* tiles) {
  float *whole = lines, *line = lines + width;
  const int64_t out_h = height / tile_h, out_w = width / tile_w;
  const float share = 1.0f / static_cast<float>(tile_h * tile_w);
  for (int64_t p = 0; p < width; ++p) whole[p] = 0.0f;
  for (int64_t i = 0; i < out_h; ++i, tiles += out_w) {
    for (int64_t p = 0; p < width; ++p) line[p] = 0.0f;
    for (int64_t r = 0; r < tile_h; ++r, x += width)
      for (int64_t p = 0; p < width; ++p) {
        const float value = scale * x[p] + shift;
        whole[p] += x[p];
        line[p] += value < 0.0f ? 0.0f : value;
      }
    for (int64_t j = 0; j < out_w; ++j) {
      float sum = line[j * tile_w];
      for (int64_t q = 1; q < tile_w; ++q) sum += line[j * tile_w + q];
      tiles[j] = sum * share;
    }
  }
  for (int64_t r = out_h * tile_h; r < height; ++r, x += width)
    for (int64_t p = 0; p < width; ++p) whole[p] += x[p];
  float sum = 0.0f;
  for (int64_t p = 0; p < width; ++p) sum += whole[p];
  return sum / static_cast<float>(height * width);
}

}  // namespace

extern "C" {

// A gate network from images to masks. x (batch, channels, plane): means, hidden = relu(W1 means + b1), logits = W2
// hidden + b2 with W2 as (hidden, gates), and for mask m the bytes masks[m] of (batch, sizes[m]): open where the logit
// is above the threshold. `open` holds a byte for each image and channel (0: the channel counts as zero), or is null. A
// mask that is immortal opens its likeliest gate; of each group of masks (their numbers, -1 behind each group), all
// close where one is closed. Returns 0, or -1 if memory ran out.
int headgate_gate_masks(const float* x, const uint8_t* open, int64_t open_stride, const float* w1, const float* b1,
                        const float* w2, const float* b2, int64_t batch, int64_t channels, int64_t plane,
                        int64_t hidden, const int64_t* sizes, const uint8_t* immortal, int64_t masks,
                        const int64_t* groups, int64_t groups_length, float threshold, uint8_t* const* out,
                        int threads) {
  int64_t gates = 0;
  for (int64_t m = 0; m < masks; ++m) gates += sizes[m];
  try {
    std::vector<float> logits(gates);
    std::vector<uint8_t> any(masks);
    std::vector<float> means(batch * channels), inner(batch * hidden);
#pragma omp parallel for num_threads(threads) if (threads > 1 && batch * channels * plane > 20000) schedule(static)
    for (int64_t first = 0; first < batch * channels; first += ROWS)
      means_of(x, first, std::min(first + ROWS, batch * channels), plane, means.data());
    for (int64_t row = 0; open && row < batch * channels; ++row)
      if (!open[(row / channels) * open_stride + row % channels]) means[row] = 0.0f;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < hidden; ++h) {
        const float sum = b1[h] + dot(w1 + h * channels, means.data() + b * channels, channels);
        inner[b * hidden + h] = sum < 0.0f ? 0.0f : sum;
      }
    for (int64_t b = 0; b < batch; ++b) {
      head(w2, b2, inner.data() + b * hidden, hidden, gates, logits.data());
      const float* row = logits.data();
      for (int64_t m = 0; m < masks; row += sizes[m], ++m) {
        uint8_t* mask = out[m] + b * sizes[m];
        any[m] = decide(row, sizes[m], threshold, mask);
        if (immortal[m] && !any[m]) {
          mask[std::max_element(row, row + sizes[m]) - row] = 1;
          any[m] = 1;
        }
      }
      for (int64_t i = 0; i < groups_length; ++i) {
        const int64_t start = i;
        bool alive = true;
        for (; groups[i] >= 0; ++i) alive &= any[groups[i]] != 0;
        if (alive) continue;
        for (int64_t j = start; j < i; ++j) std::memset(out[groups[j]] + b * sizes[groups[j]], 0, sizes[groups[j]]);
      }
    }
  } catch (...) {
    return -1;
  }
  return 0;
}

// What an exit reads of x (batch, channels, height, width), in one pass: means (batch, channels), and relu(scale x +
// shift) averaged over tiles. Returns 0, or -1 if memory ran out.
int headgate_read_planes(const float* x, const float* scale, const float* shift, float* tiles, float* means,
                         const int64_t* numbers, int threads) {
  const int64_t planes = numbers[0], channels = numbers[1], height = numbers[2], width = numbers[3];
  const int64_t tile_h = numbers[4], tile_w = numbers[5], out = (height / tile_h) * (width / tile_w);
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1 && planes * height * width > 20000)
  {
    std::unique_ptr<float[]> lines(new (std::nothrow) float[2 * width]);
    if (!lines) {
#pragma omp atomic write
      failed = -1;
    }
#pragma omp for schedule(static)
    for (int64_t plane = 0; plane < planes; ++plane)
      if (lines)
        means[plane] = read_plane(x + plane * height * width, scale[plane % channels], shift[plane % channels], height,
                                  width, tile_h, tile_w, lines.get(), tiles + plane * out);
  }
  return failed;
}

// Max pooling of planes (height, width) -> (out_height, out_width). Not 0 if there was no memory.
int headgate_max_pool(const float* x, float* y, const int64_t* numbers, int threads) {
  const int64_t planes = numbers[0], height = numbers[1], width = numbers[2], out_height = numbers[3];
  const int64_t out_width = numbers[4], kernel_h = numbers[5], kernel_w = numbers[6], stride_h = numbers[7];
  const int64_t stride_w = numbers[8], pad_h = numbers[9], pad_w = numbers[10];
  const int64_t across = width + 2 * pad_w + kernel_w;
  int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) reduction(| : failed)
  for (int64_t plane = 0; plane < planes; ++plane) {
    std::unique_ptr<float[]> rows(new (std::nothrow) float[across]);  // nothing may be thrown out of a parallel loop
    if (!rows) {
      failed = 1;
      continue;
    }
    std::fill_n(rows.get(), across, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < out_height; ++i) {
      const int64_t top = std::max<int64_t>(0, i * stride_h - pad_h);
      const int64_t bottom = std::min(height, i * stride_h - pad_h + kernel_h);
      float* line = rows.get() + pad_w;
      std::memcpy(line, x + (plane * height + top) * width, sizeof(float) * width);
      for (int64_t r = top + 1; r < bottom; ++r) {
        const float* other = x + (plane * height + r) * width;
        for (int64_t p = 0; p < width; ++p) line[p] = line[p] < other[p] || other[p] != other[p] ? other[p] : line[p];
      }
      float* to = y + (plane * out_height + i) * out_width;
      for (int64_t j = 0; j < out_width; ++j) {
        const float* from = rows.get() + j * stride_w;
        float best = from[0];
        for (int64_t q = 1; q < kernel_w; ++q) best = best < from[q] || from[q] != from[q] ? from[q] : best;
        to[j] = best;
      }
    }
  }
  return failed;
}

}  // extern "C"
