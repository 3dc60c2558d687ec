// Runs gate networks and convolutions one after the other in a single call: what a small network spends on being called
// layer by layer is more than what it computes. Plain C ABI, no headers of torch or Python.
//
// A tape is a row of 64-bit words. Each step begins with its kind; what it takes follows in the order of the function
// that carries it out. A place in memory is two words: the number of a slot and an offset in bytes from what the slot
// holds, or -1 and an address. A tape that was written for one image serves many, each thread one at a time: what a
// small network computes of an image stays in the thread's own cache from its first layer to its last. Knows nothing of
// shapes: whoever wrote the tape has checked them.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

extern "C" {

int headgate_conv2d(const float* x, const float* w, const float* bias, const float* residual, float* y,
                    const uint8_t* in_mask, int64_t in_mask_stride, const uint8_t* out_mask, int64_t out_mask_stride,
                    const int64_t* numbers, int relu, int rectified, int threads, int level_wanted);
int headgate_gate_masks(const float* x, const uint8_t* open, int64_t open_stride, const float* w1, const float* b1,
                        const float* w2, const float* b2, int64_t batch, int64_t channels, int64_t plane,
                        int64_t hidden, const int64_t* sizes, const uint8_t* immortal, int64_t masks,
                        const int64_t* groups, int64_t groups_length, float threshold, uint8_t* const* out,
                        int threads);
}

namespace {

enum Kind { CONV = 0, GATES = 1 };
constexpr int64_t NUMBERS = 15;  // of a convolution's shape

// Reads a tape word by word.
struct Reader {
  const int64_t* at;
  char* const* slots;

  int64_t number() { return *at++; }

  template <typename T>
  T* place() {
    const int64_t slot = number(), offset = number();
    return reinterpret_cast<T*>(slot < 0 ? reinterpret_cast<char*>(offset) : slots[slot] + offset);
  }
};

int run_conv(Reader& tape, int threads) {
  const float* x = tape.place<float>();
  const float* w = tape.place<float>();
  const float* bias = tape.place<float>();
  const float* residual = tape.place<float>();
  float* y = tape.place<float>();
  const uint8_t* in_mask = tape.place<uint8_t>();
  const int64_t in_stride = tape.number();
  const uint8_t* out_mask = tape.place<uint8_t>();
  const int64_t out_stride = tape.number();
  const int relu = tape.number(), rectified = tape.number();
  const int64_t* numbers = tape.at;
  tape.at += NUMBERS;
  return headgate_conv2d(x, w, bias, residual, y, in_mask, in_stride, out_mask, out_stride, numbers, relu, rectified,
                         threads, -1);
}

int run_gates(Reader& tape, std::vector<uint8_t*>& masks, int threads) {
  const float* x = tape.place<float>();
  const uint8_t* open = tape.place<uint8_t>();
  const int64_t open_stride = tape.number();
  const float* w1 = tape.place<float>();
  const float* b1 = tape.place<float>();
  const float* w2 = tape.place<float>();
  const float* b2 = tape.place<float>();
  const int64_t batch = tape.number(), channels = tape.number(), plane = tape.number(), hidden = tape.number();
  const int64_t* sizes = tape.place<int64_t>();
  const uint8_t* immortal = tape.place<uint8_t>();
  const int64_t* groups = tape.place<int64_t>();
  const int64_t groups_length = tape.number(), bits = tape.number();
  float threshold;
  std::memcpy(&threshold, &bits, sizeof(threshold));
  masks.resize(tape.number());
  for (uint8_t*& mask : masks) mask = tape.place<uint8_t>();
  return headgate_gate_masks(x, open, open_stride, w1, b1, w2, b2, batch, channels, plane, hidden, sizes, immortal,
                             masks.size(), groups, groups_length, threshold, masks.data(), threads);
}

int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

int run(const int64_t* tape, int64_t words, char* const* slots, int threads) {
  try {
    std::vector<uint8_t*> masks;
    Reader reader{tape, slots};
    while (reader.at < tape + words) {
      const int64_t kind = reader.number();
      const int failed = kind == CONV ? run_conv(reader, threads) : run_gates(reader, masks, threads);
      if (failed) return failed;
    }
  } catch (...) {
    return -1;
  }
  return 0;
}

}  // namespace

extern "C" {

// Runs a tape once, or, if there are strides, for so many images: a slot's place moves on by its stride in bytes from
// image to image, that of the last slot from thread to thread. Returns 0, or what the first step that failed returned.
int headgate_run(const int64_t* tape, int64_t words, char* const* slots, int64_t count, const int64_t* strides,
                 int64_t images, int threads) {
  if (strides == nullptr) return run(tape, words, slots, threads);
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
  {
    std::vector<char*> own;
    try {
      own.resize(count);
    } catch (...) {
      failed = -1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t image = 0; image < images; ++image) {
      if (failed) continue;
      for (int64_t slot = 0; slot < count; ++slot)
        own[slot] = slots[slot] + strides[slot] * (slot + 1 < count ? image : thread_number());
      if (const int code = run(tape, words, own.data(), 1)) failed = code;
    }
  }
  return failed;
}

}  // extern "C"
