// A convolution that computes only the open channels of each image. Plain C ABI, no headers of torch or Python.
//
// y[b, k] = act(bias[k] + sum over open c of w[k, c] * x[b, c] + residual[b, k])   where k is open in image b
// y[b, k] = act(residual[b, k]), or 0 without a residual                           where k is closed
//
// NCHW float32, weights OIHW where they lie. What an image reads is a list of (place of pixels, place in a row of
// weights): one entry for each open input channel and tap. A 1x1 convolution packs the pixels of a run side by side,
// channel after channel; all others read a copy of the open channels, padded, and for stride 2 split into even and odd
// rows and columns, so that every tap of a run of output pixels is a run of input pixels. A tile of R output channels
// by V vectors of pixels stays in registers while the list is walked; the list is cut into parts whose pixels fit the
// first-level cache, and runs whose pixels fit together use a row of weights one after the other. What lies far apart
// (rows of the output, weights that were not used yet) is asked for a tile before it is needed.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
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
  const int32_t* x_places;   // of each entry of the list; null: they are packed, entry after entry
  const int64_t* x_steps;    // from there to each vector of the tile; null: they lie side by side
  const int32_t* w_places;
  int64_t entries;
  const float* const* w_rows;         // R rows of weights
  float* const* sums;                 // R rows of partial sums
  const float* bias;                  // R values
  float* const* out;                  // R rows of the output, and what is added to them (or null)
  const float* const* residual;
  bool first;                         // nothing summed up yet: begin with the bias
  bool last;                          // all summed up: residual, activation, output
  bool relu;
};

// Where the vectors of a tile lie: packed entry after entry, side by side in a copy, or in rows of it.
enum Pixels { PACKED, IN_A_RUN, IN_ROWS };

// Pixels to be copied side by side, channel after channel.
struct Pack {
  const float* x;           // the first pixel of channel 0
  const int32_t* channels;
  int64_t entries, plane;   // channels, and floats from one to the next
  float* to;
};

constexpr int64_t TILE_VECTORS = 4;
constexpr int64_t MOST_ROWS = 8;
constexpr int64_t FLOATS_A_LINE = 16;
constexpr int64_t NEAR_FLOATS = 6144;    // of pixels: three quarters of a first-level cache of 32 KiB
constexpr int64_t ENTRIES_A_PART = 192;  // of a list, if their pixels are near then
constexpr int64_t MOST_RUNS = 16;        // whose sums are kept at once

#define HEADGATE_KERNEL_NAMESPACE portable
#define HEADGATE_TARGET
#define HEADGATE_LANES 4
#define HEADGATE_ROWS 4, 4, 4, 3
#include "tiles.inc"

#if defined(__x86_64__) && defined(__GNUC__)
#define HEADGATE_KERNEL_NAMESPACE avx2
#define HEADGATE_TARGET __attribute__((target("avx2,fma")))
#define HEADGATE_LANES 8
#define HEADGATE_ROWS 8, 6, 4, 3
#include "tiles.inc"

#define HEADGATE_KERNEL_NAMESPACE avx512
#define HEADGATE_TARGET __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw")))
#define HEADGATE_LANES 16
#define HEADGATE_ROWS 8, 8, 8, 6
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

void run_pack(Level level, int64_t vectors, const Pack& pack) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (level == AVX512) return avx512::run(vectors, pack);
  if (level == AVX2) return avx2::run(vectors, pack);
#endif
  portable::run(vectors, pack);
}

// Rows of a tile: as many as registers hold beside V vectors of pixels.
int64_t rows_of(Level level, int64_t vectors) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (level == AVX512) return avx512::ROWS[vectors - 1];
  if (level == AVX2) return avx2::ROWS[vectors - 1];
#endif
  return portable::ROWS[vectors - 1];
}

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Where the taps of a convolution find their pixels in the copy of one channel.
struct Copy {
  int64_t phases_h, phases_w;  // even and odd rows, columns: as many as taps ask for
  int64_t rows, columns;       // of one phase
  int64_t phase;               // floats of one phase
  int64_t plane;               // floats of one channel
  int64_t run;                 // output pixels of one channel as they are computed: rows of `columns`, some not needed
};

// How many phases the taps of one direction fall into; they are numbered as the remainders are if all are needed.
int64_t phases_of(int64_t kernel, int64_t dilation, int64_t stride) {
  if (kernel == 1 || dilation % stride == 0) return 1;
  return stride;
}

Copy copy_of(const Shape& s, int64_t lanes, bool flat) {
  Copy copy{};
  copy.phases_h = phases_of(s.kernel_h, s.dilation_h, s.stride_h);
  copy.phases_w = phases_of(s.kernel_w, s.dilation_w, s.stride_w);
  int64_t reach_h = (s.kernel_h - 1) * s.dilation_h, reach_w = (s.kernel_w - 1) * s.dilation_w;
  copy.rows = s.out_height + reach_h / s.stride_h;
  copy.columns = s.out_width + reach_w / s.stride_w;
  copy.run = flat ? s.out_height * s.out_width : (s.out_height - 1) * copy.columns + s.out_width;
  // the last vector of a run may read beyond it
  copy.phase = round_up(copy.rows * copy.columns + TILE_VECTORS * lanes, lanes);
  copy.plane = copy.phase * copy.phases_h * copy.phases_w;
  return copy;
}

void copy_channel(const Shape& s, const Copy& copy, const float* from, float* to) {
  for (int64_t ph = 0; ph < copy.phases_h; ++ph)
    for (int64_t pw = 0; pw < copy.phases_w; ++pw) {
      float* phase = to + (ph * copy.phases_w + pw) * copy.phase;
      for (int64_t r = 0; r < copy.rows; ++r) {
        const int64_t y = r * s.stride_h + ph - s.pad_h;
        float* row = phase + r * copy.columns;
        if (y < 0 || y >= s.height) {
          std::memset(row, 0, sizeof(float) * copy.columns);
          continue;
        }
        const float* line = from + y * s.width;
        // column q holds the pixel q * stride + pw - pad: the first and the last that exist
        const int64_t shift = s.pad_w - pw;
        int64_t first = shift <= 0 ? 0 : (shift + s.stride_w - 1) / s.stride_w;
        int64_t last = s.width - 1 + shift < 0 ? 0 : (s.width - 1 + shift) / s.stride_w + 1;
        first = std::min(first, copy.columns);
        last = std::max(first, std::min(last, copy.columns));
        std::memset(row, 0, sizeof(float) * first);
        if (s.stride_w == 1)
          std::memcpy(row + first, line + first - shift, sizeof(float) * (last - first));
        else
          for (int64_t q = first; q < last; ++q) row[q] = line[q * s.stride_w - shift];
        std::memset(row + last, 0, sizeof(float) * (copy.columns - last));
      }
      const int64_t used = copy.rows * copy.columns;
      std::memset(phase + used, 0, sizeof(float) * (copy.phase - used));
    }
}

// Memory that is kept from call to call, each thread its own. It begins with a line of the cache: vectors that lie
// across two lines are read twice.
class Scratch {
 public:
  float* at_least(size_t floats) {
    if (floats > size_) {
      size_ = 0;  // if there is no memory for more
      data_.reset();  // first, so that both are never held at once
      data_.reset(new float[floats + FLOATS_A_LINE]);
      size_ = floats;
    }
    const uintptr_t bytes = FLOATS_A_LINE * sizeof(float), place = reinterpret_cast<uintptr_t>(data_.get());
    return data_.get() + (round_up(place, bytes) - place) / sizeof(float);
  }

 private:
  std::unique_ptr<float[]> data_;
  size_t size_ = 0;
};
thread_local Scratch shared_copies, own_copies, own_sums, own_pack;

// The open channels of an image, and the list of what is read for each output.
struct Image {
  std::vector<int32_t> inputs, outputs;
  std::vector<int32_t> x_places, w_places;  // packed pixels need no places
};

void list_open(const uint8_t* mask, int64_t count, std::vector<int32_t>& open) {
  open.clear();
  for (int64_t c = 0; c < count; ++c)
    if (mask == nullptr || mask[c]) open.push_back(static_cast<int32_t>(c));
}

// One call: everything that is the same for all images.
struct Job {
  Shape s;
  Level level;
  int64_t lanes, in_plane, out_plane, taps, vectors, runs, entries_a_part;
  bool flat;    // output pixels are computed in their order, without gaps
  bool in_rows; // because a row of the output is a whole number of vectors
  bool packed;  // 1x1: nothing is copied but the pixels of a run
  bool relu;
  Copy copy;
  std::vector<int32_t> tap_places;
  const float *x, *w, *bias, *residual;
  float* y;
  const uint8_t *in_mask, *out_mask;
  int64_t in_mask_stride, out_mask_stride;
  bool closed_is_done;  // closed outputs hold what they should already

  void read_masks(int64_t b, Image& image) const {
    list_open(in_mask ? in_mask + b * in_mask_stride : nullptr, s.in_channels, image.inputs);
    list_open(out_mask ? out_mask + b * out_mask_stride : nullptr, s.out_channels, image.outputs);
    const size_t entries = image.outputs.empty() ? 0 : image.inputs.size() * taps;
    image.x_places.resize(packed ? 0 : entries);
    image.w_places.resize(entries);
    for (size_t i = 0, e = 0; e < entries; ++i, e += taps) {
      const int32_t weight = static_cast<int32_t>(image.inputs[i] * taps);
      for (int64_t tap = 0; tap < taps; ++tap) image.w_places[e + tap] = weight + static_cast<int32_t>(tap);
      if (packed) continue;
      const int32_t pixels = static_cast<int32_t>(i * copy.plane);
      for (int64_t tap = 0; tap < taps; ++tap) image.x_places[e + tap] = pixels + tap_places[tap];
    }
  }

  // Where each tap finds its pixels in the copy of a channel.
  void place_taps() {
    if (packed) return;
    tap_places.reserve(taps);
    for (int64_t kh = 0; kh < s.kernel_h; ++kh)
      for (int64_t kw = 0; kw < s.kernel_w; ++kw) {
        const int64_t dh = kh * s.dilation_h, dw = kw * s.dilation_w;
        const int64_t ph = copy.phases_h == 1 ? 0 : dh % s.stride_h, pw = copy.phases_w == 1 ? 0 : dw % s.stride_w;
        tap_places.push_back(static_cast<int32_t>((ph * copy.phases_w + pw) * copy.phase +
                                                  (dh / s.stride_h) * copy.columns + dw / s.stride_w));
      }
  }

  size_t copied(const Image& image) const {
    return packed || image.outputs.empty() ? 0 : image.inputs.size() * copy.plane;
  }

  void copy_input(int64_t b, const Image& image, int64_t i, float* copies) const {
    copy_channel(s, copy, x + (b * s.in_channels + image.inputs[i]) * in_plane, copies + i * copy.plane);
  }

  // The pixels [pixel, pixel + width) of some channels, side by side; zeros behind the last pixel.
  void pack(const float* image_x, const int32_t* channels, int64_t entries, int64_t pixel, int64_t width,
            float* to) const {
    const int64_t count = std::min(width, out_plane - pixel);
    if (s.stride_h == 1 && s.stride_w == 1 && count == width)
      return run_pack(level, width / lanes, Pack{image_x + pixel, channels, entries, in_plane, to});
    for (int64_t e = 0; e < entries; ++e, to += width) {
      const float* from = image_x + channels[e] * in_plane;
      if (s.stride_h == 1 && s.stride_w == 1) {
        std::memcpy(to, from + pixel, sizeof(float) * count);
      } else {
        int64_t row = pixel / s.out_width, column = pixel % s.out_width;
        for (int64_t p = 0; p < count;) {
          const int64_t stop = std::min(count, p + s.out_width - column);
          const float* line = from + row * s.stride_h * s.width + column * s.stride_w;
          for (; p < stop; ++p, line += s.stride_w) to[p] = *line;
          ++row, column = 0;
        }
      }
      if (count < width) std::memset(to + count, 0, sizeof(float) * (width - count));
    }
  }

  // How many runs, one after the other, find the pixels of a part of the list in the first-level cache: all of them
  // use a row of weights as long as it is there, too.
  int64_t runs_at_once(int64_t entries) const {
    const int64_t part = std::min(entries, entries_a_part), width = TILE_VECTORS * lanes;
    if (part == 0) return 1;
    const int64_t channels = (part + taps - 1) / taps;
    const int64_t reach = packed ? 0 : (copy.rows - s.out_height) * copy.columns + copy.columns - s.out_width;
    return std::max<int64_t>(1, std::min((NEAR_FLOATS / (channels * copy.phases_h * copy.phases_w) - reach) / width,
                                         MOST_RUNS));
  }

  // Runs of pixels [first_run, last_run) of the open outputs [first_out, last_out) of an image.
  void compute(int64_t b, const Image& image, const float* copies, int64_t first_run, int64_t last_run,
               int64_t first_out, int64_t last_out) const {
    if (last_out <= first_out) return;
    const int64_t entries = image.w_places.size(), whole = vectors / TILE_VECTORS;  // runs of four vectors
    const int64_t at_once = runs_at_once(entries);
    for (int64_t run = first_run; run < last_run;) {
      const int64_t stop = run < whole ? std::min({run + at_once, last_run, whole}) : run + 1;
      compute_together(b, image, copies, run, stop, first_out, last_out, run == first_run);
      run = stop;
    }
  }

  // Have the weights of entries [first, last) of the list come from memory, for the open outputs [first_out, last_out).
  void fetch(const Image& image, int64_t first, int64_t last, int64_t first_out, int64_t last_out) const {
    if (last <= first) return;
    for (int64_t k = first_out; k < last_out; ++k) {
      const float* row = w + image.outputs[k] * s.in_channels * taps;
      for (int64_t place = image.w_places[first]; place <= image.w_places[last - 1]; place += FLOATS_A_LINE)
        __builtin_prefetch(row + place);
    }
  }

  // The same as `compute`, of runs that have as many vectors; `cold` if the weights were not used a moment ago.
  void compute_together(int64_t b, const Image& image, const float* copies, int64_t first_run, int64_t last_run,
                        int64_t first_out, int64_t last_out, bool cold) const {
    const float* image_x = x + b * s.in_channels * in_plane;
    const int64_t entries = image.w_places.size(), runs_here = last_run - first_run;
    const int64_t parts = std::max<int64_t>(1, (entries + entries_a_part - 1) / entries_a_part);
    const int64_t v = std::min(TILE_VECTORS, vectors - first_run * TILE_VECTORS), width = v * lanes;
    const int64_t most_rows = rows_of(level, v), open = last_out - first_out;
    const int64_t tiles = (open + most_rows - 1) / most_rows;  // as many rows in each, as far as possible
    const int64_t a_pack = entries_a_part * width, a_row = runs_here * width;
    float* pack_room = packed ? own_pack.at_least(runs_here * a_pack) : nullptr;
    float* room = own_sums.at_least((last_out - first_out) * a_row);
    float* outs[MOST_ROWS];
    float* sums[MOST_ROWS];
    const float* w_rows[MOST_ROWS];
    const float* adds[MOST_ROWS];
    float biases[MOST_ROWS];
    int64_t starts[MOST_RUNS], steps[MOST_RUNS][TILE_VECTORS];  // of the pixels that a run reads
    for (int64_t i = 0; i < runs_here; ++i) {
      const int64_t vector = (first_run + i) * TILE_VECTORS;
      starts[i] = start_of(vector);
      for (int64_t j = 0; j < v; ++j) steps[i][j] = start_of(vector + j) - starts[i];
    }
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = entries * part / parts, last = entries * (part + 1) / parts;
      if (packed)
        for (int64_t i = 0; i < runs_here; ++i)
          pack(image_x, image.inputs.data() + first, last - first, (first_run + i) * TILE_VECTORS * lanes, width,
               pack_room + i * a_pack);
      const int32_t* places = packed ? nullptr : image.x_places.data() + first;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t k = first_out + open * tile / tiles, rows = first_out + open * (tile + 1) / tiles - k;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t channel = image.outputs[k + r];
          w_rows[r] = w + channel * s.in_channels * taps;
          biases[r] = bias ? bias[channel] : 0.0f;
        }
        if (cold) fetch(image, first, last, k + rows, std::min(k + rows + most_rows, last_out));
        for (int64_t i = 0; i < runs_here; ++i) {
          const int64_t pixel = (first_run + i) * TILE_VECTORS * lanes;
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t start = (b * s.out_channels + image.outputs[k + r]) * out_plane + pixel;
            sums[r] = room + (k + r - first_out) * a_row + i * width;
            outs[r] = y + start;
            adds[r] = residual ? residual + start : nullptr;
          }
          run_tile(level, v, rows,
                   Tile{packed ? pack_room + i * a_pack : copies + starts[i], places, in_rows ? steps[i] : nullptr,
                        image.w_places.data() + first, last - first, w_rows, sums, biases, outs, adds, part == 0,
                        part + 1 == parts && straight(pixel, width), relu});
        }
      }
    }
    for (int64_t i = 0; i < runs_here; ++i) {
      const int64_t pixel = (first_run + i) * TILE_VECTORS * lanes;
      if (straight(pixel, width)) continue;
      for (int64_t k = first_out; k < last_out; ++k)
        scatter(room + (k - first_out) * a_row + i * width, (b * s.out_channels + image.outputs[k]) * out_plane, pixel,
                std::min(pixel + width, copy.run));
    }
  }

  // Where the first tap of a vector of output pixels finds its input in the copy of a channel.
  int64_t start_of(int64_t vector) const {
    const int64_t pixel = vector * lanes;
    return in_rows ? pixel / s.out_width * copy.columns + pixel % s.out_width : pixel;
  }

  // Whether a run's sums are the output's pixels as they lie.
  bool straight(int64_t pixel, int64_t width) const { return flat && pixel + width <= out_plane; }

  // From computed runs to the output's pixels; residual and activation on the way.
  void scatter(const float* sum, int64_t channel, int64_t pixel, int64_t stop) const {
    const int64_t columns = flat ? copy.run : copy.columns, useful_columns = flat ? copy.run : s.out_width;
    for (int64_t p = pixel; p < stop;) {
      const int64_t row = p / columns, column = p % columns;
      const int64_t count = std::min(stop - p, columns - column);
      const int64_t useful = std::max<int64_t>(0, std::min(count, useful_columns - column));
      const int64_t place = channel + row * useful_columns + column;
      finish(sum + p - pixel, place, useful);
      p += count;
    }
  }

  void finish(const float* sum, int64_t place, int64_t count) const {
    for (int64_t q = 0; q < count; ++q) {
      const float value = sum[q] + (residual ? residual[place + q] : 0.0f);
      y[place + q] = relu && value < 0.0f ? 0.0f : value;
    }
  }

  void close(int64_t b, int64_t k) const {
    if (closed_is_done || out_mask == nullptr || out_mask[b * out_mask_stride + k]) return;
    const int64_t place = (b * s.out_channels + k) * out_plane;
    if (!residual) {
      std::memset(y + place, 0, sizeof(float) * out_plane);
      return;
    }
    for (int64_t p = place; p < place + out_plane; ++p) y[p] = relu && residual[p] < 0.0f ? 0.0f : residual[p];
  }

  // A whole image, by one thread.
  void whole(int64_t b, Image& image) const {
    read_masks(b, image);
    float* copies = own_copies.at_least(copied(image));
    if (copied(image))
      for (size_t i = 0; i < image.inputs.size(); ++i) copy_input(b, image, i, copies);
    compute(b, image, copies, 0, runs, 0, image.outputs.size());
    for (int64_t k = 0; k < s.out_channels; ++k) close(b, k);
  }
};

}  // namespace

extern "C" {

// Of the functions below, in gates.cpp and in tape.cpp: another number wherever their arguments are others. Also in native.py.
int headgate_version() { return 3; }

int headgate_level() { return best_level(); }

// Masks hold a byte for each image and channel (0: closed), or one row for all images (stride 0), or are null: all open.
// `y` may be the residual itself; with `rectified`, the residual has no negative values. Returns 0, or -1 if memory ran
// out, or 1 where copies or weights have more places than 32 bits can tell: nothing is done then.
int headgate_conv2d(const float* x, const float* w, const float* bias, const float* residual, float* y,
                    const uint8_t* in_mask, int64_t in_mask_stride, const uint8_t* out_mask, int64_t out_mask_stride,
                    const int64_t* numbers, int relu, int rectified, int threads, int level_wanted) {
  Job job{};
  Shape& s = job.s;
  s = Shape{numbers[0], numbers[1], numbers[2],  numbers[3],  numbers[4],  numbers[5],  numbers[6], numbers[7],
            numbers[8], numbers[9], numbers[10], numbers[11], numbers[12], numbers[13], numbers[14]};
  job.level = level_wanted < 0 ? best_level() : std::min(static_cast<Level>(level_wanted), best_level());
  job.lanes = lanes_of(job.level);
  job.in_plane = s.height * s.width;
  job.out_plane = s.out_height * s.out_width;
  job.taps = s.kernel_h * s.kernel_w;
  job.packed = job.taps == 1 && s.pad_h == 0 && s.pad_w == 0;
  job.in_rows = !job.packed && s.out_width % job.lanes == 0;
  job.flat = job.packed || job.in_rows;
  job.copy = copy_of(s, job.lanes, job.flat);
  if (s.in_channels * std::max(job.packed ? 0 : job.copy.plane, job.taps) > INT32_MAX) return 1;
  job.vectors = round_up(job.copy.run, job.lanes) / job.lanes;
  job.runs = (job.vectors + TILE_VECTORS - 1) / TILE_VECTORS;
  job.entries_a_part =
      job.packed ? std::min(ENTRIES_A_PART, NEAR_FLOATS / (TILE_VECTORS * job.lanes)) : ENTRIES_A_PART;
  job.relu = relu != 0;
  job.x = x, job.w = w, job.bias = bias, job.residual = residual, job.y = y;
  job.in_mask = in_mask, job.out_mask = out_mask;
  job.in_mask_stride = in_mask_stride, job.out_mask_stride = out_mask_stride;
  job.closed_is_done = residual == y && residual != nullptr && (!job.relu || rectified);

  try {
    job.place_taps();
  } catch (...) {
    return -1;
  }

  // an exception must not leave the piece of a parallel loop that it came up in
  std::atomic<bool> failed{false};
  const auto guarded = [&failed](const auto& work) {
    try {
      work();
    } catch (...) {
      failed = true;
    }
  };
  const int team = std::max(1, threads);
  if (s.batch >= team) {  // every thread its own images: what it copies stays in its cache
#pragma omp parallel num_threads(team) if (team > 1)
    {
      Image image;
#pragma omp for schedule(dynamic, 1)
      for (int64_t b = 0; b < s.batch; ++b) guarded([&] { job.whole(b, image); });
    }
    return failed ? -1 : 0;
  }
  Image image;
  for (int64_t b = 0; b < s.batch && !failed; ++b) {
    float* copies = nullptr;
    guarded([&] {
      job.read_masks(b, image);
      copies = shared_copies.at_least(job.copied(image));
    });
    if (failed) break;
    const int64_t inputs = job.copied(image) ? image.inputs.size() : 0, open = image.outputs.size();
    // long runs of pixels are shared by threads, short ones give each thread some of the outputs
    const bool long_runs = job.runs >= 4 * team;
    const int64_t ranges = long_runs ? 1 : team, pieces = long_runs ? 2 * team : 1;
#pragma omp parallel num_threads(team)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < inputs; ++i) job.copy_input(b, image, i, copies);
#pragma omp for schedule(dynamic, 1) collapse(2) nowait
      for (int64_t piece = 0; piece < pieces; ++piece)
        for (int64_t range = 0; range < ranges; ++range)
          guarded([&] {
            job.compute(b, image, copies, job.runs * piece / pieces, job.runs * (piece + 1) / pieces,
                        open * range / ranges, open * (range + 1) / ranges);
          });
#pragma omp for schedule(static)
      for (int64_t k = 0; k < s.out_channels; ++k) job.close(b, k);
    }
  }
  return failed ? -1 : 0;
}

}  // extern "C"
