// A convolution that computes only the open channels of each image. Plain C ABI, no headers of torch or Python.
//
// y[b, k] = act(bias[k] + sum over open c of w[k, c] * x[b, c] + residual[b, k])   where k is open in image b
// y[b, k] = act(residual[b, k]), or 0 without a residual                           where k is closed
//
// NCHW float32, weights OIHW where they lie. What an image reads is a list of (place in its input, place in a row of
// weights): one entry for each open input channel and tap. A 1x1 convolution of stride 1 reads the input itself; all
// others read a copy of the open channels, padded, and for stride 2 split into even and odd rows and columns, so that
// every tap of a run of output pixels is a run of input pixels. A tile of R output channels by V vectors of pixels
// stays in registers while the list is walked; the list is cut into parts whose pixels fit the first-level cache.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

struct Shape {
  int64_t batch, in_channels, height, width, out_channels, out_height, out_width;
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

struct Tile {
  const float* x;            // pixels of the tile, entry 0
  const int32_t* x_places;   // of each entry of the list
  const int32_t* w_places;
  int64_t entries;
  const float* const* w_rows;  // R rows of weights
  float* const* sums;          // R rows of partial sums
  bool first;                  // nothing summed up yet: begin with the bias
  const float* bias;           // R values
};

constexpr int64_t ENTRIES_A_PART = 160;

#define HEADGATE_KERNEL_NAMESPACE portable
#define HEADGATE_TARGET
#define HEADGATE_LANES 4
#include "tiles.inc"

#if defined(__x86_64__) && defined(__GNUC__)
#define HEADGATE_KERNEL_NAMESPACE avx2
#define HEADGATE_TARGET __attribute__((target("avx2,fma")))
#define HEADGATE_LANES 8
#include "tiles.inc"

#define HEADGATE_KERNEL_NAMESPACE avx512
#define HEADGATE_TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw")))
#define HEADGATE_LANES 16
#include "tiles.inc"
#endif

enum Level { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

Level best_level() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw"))
    return AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
  return PORTABLE;
}

int64_t lanes_of(Level level) { return level == AVX512 ? 16 : level == AVX2 ? 8 : 4; }

void run_tile(Level level, int64_t vectors, int64_t rows, const Tile& tile) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (level == AVX512) return avx512::run(vectors, rows, tile);
  if (level == AVX2) return avx2::run(vectors, rows, tile);
#endif
  portable::run(vectors, rows, tile);
}

// Rows of a tile: as many as registers hold beside V vectors of pixels.
int64_t rows_of(Level level, int64_t vectors) {
  if (level == AVX512) return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 8 : 8;
  if (level == AVX2) return vectors == 4 ? 3 : vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
  return vectors == 4 ? 3 : vectors == 3 ? 4 : 4;
}

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Where the taps of a convolution find their pixels in the copy of one channel.
struct Copy {
  int64_t phases_h, phases_w;  // even and odd rows, columns
  int64_t rows, columns;       // of one phase
  int64_t phase;               // floats of one phase
  int64_t plane;               // floats of one channel
  int64_t run;                 // output pixels of one channel as they are computed: rows of `columns`, some not needed
};

Copy copy_of(const Shape& s, int64_t lanes, bool flat) {
  Copy copy{};
  copy.phases_h = s.stride_h;
  copy.phases_w = s.stride_w;
  int64_t reach_h = (s.kernel_h - 1) * s.dilation_h, reach_w = (s.kernel_w - 1) * s.dilation_w;
  copy.rows = s.out_height + reach_h / s.stride_h;
  copy.columns = s.out_width + reach_w / s.stride_w;
  copy.run = flat ? s.out_height * s.out_width : (s.out_height - 1) * copy.columns + s.out_width;
  // the last vector of a run may read beyond it
  copy.phase = round_up(copy.rows * copy.columns + 4 * lanes, lanes);
  copy.plane = copy.phase * copy.phases_h * copy.phases_w;
  return copy;
}

void copy_channel(const Shape& s, const Copy& copy, const float* from, float* to) {
  std::memset(to, 0, sizeof(float) * copy.plane);
  for (int64_t ph = 0; ph < copy.phases_h; ++ph)
    for (int64_t pw = 0; pw < copy.phases_w; ++pw) {
      float* phase = to + (ph * copy.phases_w + pw) * copy.phase;
      for (int64_t r = 0; r < copy.rows; ++r) {
        int64_t y = r * s.stride_h + ph - s.pad_h;
        if (y < 0 || y >= s.height) continue;
        float* row = phase + r * copy.columns;
        const float* line = from + y * s.width;
        if (s.stride_w == 1) {
          int64_t first = std::max<int64_t>(0, s.pad_w), last = std::min(copy.columns, s.width + s.pad_w);
          if (last > first) std::memcpy(row + first, line + first - s.pad_w, sizeof(float) * (last - first));
        } else {
          for (int64_t q = 0; q < copy.columns; ++q) {
            int64_t x = q * s.stride_w + pw - s.pad_w;
            if (x >= 0 && x < s.width) row[q] = line[x];
          }
        }
      }
    }
}

struct Image {
  std::vector<int32_t> inputs, outputs;   // open channels
  std::vector<int32_t> x_places, w_places;
};

void list_open(const uint8_t* mask, int64_t count, std::vector<int32_t>& open) {
  open.clear();
  for (int64_t c = 0; c < count; ++c)
    if (mask == nullptr || mask[c]) open.push_back(static_cast<int32_t>(c));
}

}  // namespace

extern "C" {

int headgate_level() { return best_level(); }

// Masks hold a byte for each image and channel (0: closed), or one row for all images (stride 0), or are null: all open.
// Scratch memory is allocated here. Returns 0, or -1 if memory ran out.
int headgate_conv2d(const float* x, const float* w, const float* bias, const float* residual, float* y,
                    const uint8_t* in_mask, int64_t in_mask_stride, const uint8_t* out_mask, int64_t out_mask_stride,
                    const int64_t* numbers, int relu, int threads, int level_wanted) {
  Shape s{numbers[0], numbers[1], numbers[2],  numbers[3],  numbers[4],  numbers[5],  numbers[6], numbers[7],
          numbers[8], numbers[9], numbers[10], numbers[11], numbers[12], numbers[13], numbers[14]};
  const Level level = level_wanted < 0 ? best_level() : std::min(static_cast<Level>(level_wanted), best_level());
  const int64_t lanes = lanes_of(level);
  const int64_t in_plane = s.height * s.width, out_plane = s.out_height * s.out_width;
  const int64_t taps = s.kernel_h * s.kernel_w;
  const bool flat = taps == 1 && s.stride_h == 1 && s.stride_w == 1 && s.pad_h == 0 && s.pad_w == 0;
  const bool direct = flat && in_plane % lanes == 0;
  const Copy copy = copy_of(s, lanes, flat);
  const int64_t vectors = round_up(copy.run, lanes) / lanes;
  const int64_t computed = vectors * lanes;
  const int64_t row_of_weights = s.in_channels * taps;

  try {
    std::vector<Image> images(s.batch);
    int64_t most_inputs = 0;
    for (int64_t b = 0; b < s.batch; ++b) {
      Image& image = images[b];
      list_open(in_mask ? in_mask + b * in_mask_stride : nullptr, s.in_channels, image.inputs);
      list_open(out_mask ? out_mask + b * out_mask_stride : nullptr, s.out_channels, image.outputs);
      most_inputs = std::max<int64_t>(most_inputs, image.inputs.size());
      image.x_places.reserve(image.inputs.size() * taps);
      image.w_places.reserve(image.inputs.size() * taps);
      for (size_t i = 0; i < image.inputs.size(); ++i)
        for (int64_t kh = 0; kh < s.kernel_h; ++kh)
          for (int64_t kw = 0; kw < s.kernel_w; ++kw) {
            int64_t dh = kh * s.dilation_h, dw = kw * s.dilation_w;
            int64_t place = direct ? image.inputs[i] * in_plane
                                   : static_cast<int64_t>(i) * copy.plane +
                                         ((dh % s.stride_h) * copy.phases_w + dw % s.stride_w) * copy.phase +
                                         (dh / s.stride_h) * copy.columns + dw / s.stride_w;
            image.x_places.push_back(static_cast<int32_t>(place));
            image.w_places.push_back(static_cast<int32_t>(image.inputs[i] * taps + kh * s.kernel_w + kw));
          }
    }
    std::vector<float> copies(direct ? 0 : static_cast<size_t>(s.batch * most_inputs * copy.plane));
    const int64_t image_copy = most_inputs * copy.plane;
    const bool in_place = copy.run == out_plane && out_plane % lanes == 0;  // sums need no room of their own

    // Work: images x runs of pixels x ranges of output channels.
    const int64_t tile_vectors = 4;
    const int64_t runs = (vectors + tile_vectors - 1) / tile_vectors;
    int64_t ranges = 1;
    while (s.batch * runs * ranges < 3 * threads && ranges * 24 < s.out_channels) ranges *= 2;

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (!direct) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t b = 0; b < s.batch; ++b)
          for (int64_t i = 0; i < most_inputs; ++i)
            if (i < static_cast<int64_t>(images[b].inputs.size()))
              copy_channel(s, copy, x + (b * s.in_channels + images[b].inputs[i]) * in_plane,
                           copies.data() + b * image_copy + i * copy.plane);
      }
      std::vector<float> room(in_place ? 0 : static_cast<size_t>(s.out_channels * tile_vectors * lanes));
#pragma omp for schedule(dynamic, 1) collapse(3)
      for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t run = 0; run < runs; ++run)
          for (int64_t range = 0; range < ranges; ++range) {
            const Image& image = images[b];
            const int64_t open = image.outputs.size(), entries = image.x_places.size();
            const int64_t first_out = open * range / ranges, last_out = open * (range + 1) / ranges;
            const int64_t first_vector = run * tile_vectors;
            const int64_t v = std::min(tile_vectors, vectors - first_vector);
            const int64_t pixel = first_vector * lanes, width = v * lanes;
            const float* base = direct ? x + b * s.in_channels * in_plane : copies.data() + b * image_copy;
            const int64_t most_rows = rows_of(level, v);
            for (int64_t part = 0; part < std::max<int64_t>(entries, 1); part += ENTRIES_A_PART) {
              for (int64_t k = first_out; k < last_out; k += most_rows) {
                const int64_t rows = std::min(most_rows, last_out - k);
                const float* w_rows[8];
                float* sums[8];
                float biases[8];
                for (int64_t r = 0; r < rows; ++r) {
                  const int64_t channel = image.outputs[k + r];
                  w_rows[r] = w + channel * row_of_weights;
                  sums[r] = in_place ? y + (b * s.out_channels + channel) * out_plane + pixel
                                     : room.data() + (k + r) * tile_vectors * lanes;
                  biases[r] = bias ? bias[channel] : 0.0f;
                }
                Tile tile{base + pixel,
                          image.x_places.data() + part,
                          image.w_places.data() + part,
                          std::max<int64_t>(0, std::min(ENTRIES_A_PART, entries - part)),
                          w_rows,
                          sums,
                          part == 0,
                          biases};
                run_tile(level, v, rows, tile);
              }
            }
            // From computed runs to the output's pixels; residual and activation on the way.
            for (int64_t k = first_out; k < last_out; ++k) {
              const int64_t channel = image.outputs[k];
              float* out = y + (b * s.out_channels + channel) * out_plane;
              const float* add = residual ? residual + (b * s.out_channels + channel) * out_plane : nullptr;
              const float* sum = in_place ? out + pixel : room.data() + k * tile_vectors * lanes;
              if (flat || in_place) {
                const int64_t count = std::min(width, out_plane - pixel);
                for (int64_t p = 0; p < count; ++p) {
                  float value = sum[p] + (add ? add[pixel + p] : 0.0f);
                  out[pixel + p] = relu && !(value > 0.0f) ? 0.0f : value;
                }
              } else {
                const int64_t stop = std::min(pixel + width, copy.run);
                for (int64_t p = pixel; p < stop;) {
                  const int64_t row = p / copy.columns, column = p % copy.columns;
                  const int64_t count = std::min(stop - p, copy.columns - column);
                  const int64_t useful = std::min(count, s.out_width - column);
                  for (int64_t q = 0; q < useful; ++q) {
                    const int64_t place = row * s.out_width + column + q;
                    float value = sum[p - pixel + q] + (add ? add[place] : 0.0f);
                    out[place] = relu && !(value > 0.0f) ? 0.0f : value;
                  }
                  p += count;
                }
              }
            }
          }
      // Closed outputs.
      if (out_mask) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t b = 0; b < s.batch; ++b)
          for (int64_t k = 0; k < s.out_channels; ++k) {
            if (out_mask[b * out_mask_stride + k]) continue;
            float* out = y + (b * s.out_channels + k) * out_plane;
            if (!residual) {
              std::memset(out, 0, sizeof(float) * out_plane);
              continue;
            }
            const float* add = residual + (b * s.out_channels + k) * out_plane;
            for (int64_t p = 0; p < out_plane; ++p) out[p] = relu && !(add[p] > 0.0f) ? 0.0f : add[p];
          }
      }
    }
    (void)computed;
  } catch (...) {
    return -1;
  }
  return 0;
}

}  // extern "C"
