// Runs the kernel on random shapes in memory of exactly the right size, against a convolution of seven loops.
// Compiled with AddressSanitizer by test_kernel.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#define HEADGATE_CLONES  // clones are chosen before the sanitizer is awake
#include "conv.cpp"
#include "gates.cpp"
#include "tape.cpp"

int main() {
  std::mt19937 random(1);
  auto pick = [&](int low, int high) { return static_cast<int64_t>(low + random() % (high - low + 1)); };
  auto noise = [&](int64_t count) {
    std::unique_ptr<float[]> made(new float[std::max<int64_t>(count, 1)]);
    for (int64_t i = 0; i < count; ++i) made[i] = static_cast<int>(random() % 2001 - 1000) / 1000.0f;
    return made;
  };
  for (int round = 0; round < 200; ++round) {
    int64_t B = pick(1, 3), C = pick(1, 12), K = pick(1, 12), kh = pick(1, 4), kw = pick(1, 4);
    int64_t sh = pick(1, 3), sw = pick(1, 3), ph = pick(0, 2), pw = pick(0, 2), dh = pick(1, 2), dw = pick(1, 2);
    int64_t H = std::max<int64_t>(1, dh * (kh - 1) + 1 - 2 * ph) + pick(0, 12);
    int64_t W = std::max<int64_t>(1, dw * (kw - 1) + 1 - 2 * pw) + pick(0, 12);
    if (round % 3 == 0) kh = kw = sh = sw = 1, ph = pw = 0, H = pick(1, 9), W = pick(1, 9);
    int64_t OH = (H + 2 * ph - dh * (kh - 1) - 1) / sh + 1, OW = (W + 2 * pw - dw * (kw - 1) - 1) / sw + 1;
    auto x = noise(B * C * H * W), w = noise(K * C * kh * kw), bias = noise(K), add = noise(B * K * OH * OW);
    auto y = noise(B * K * OH * OW);
    std::unique_ptr<uint8_t[]> in(new uint8_t[B * C]), out(new uint8_t[B * K]);
    unsigned share = random() % 5;  // 0: all closed
    for (int64_t i = 0; i < B * C; ++i) in[i] = random() % 4 < share;
    for (int64_t i = 0; i < B * K; ++i) out[i] = random() % 4 < share;
    int64_t numbers[15] = {B, C, H, W, K, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw};
    bool has_add = random() % 2, relu = random() % 2;
    for (int level = 0; level <= headgate_level(); ++level) {
      headgate_conv2d(x.get(), w.get(), bias.get(), has_add ? add.get() : nullptr, y.get(), in.get(), C, out.get(), K,
                      numbers, relu, 0, 1 + round % 2, level);
      for (int64_t b = 0; b < B; ++b)
        for (int64_t k = 0; k < K; ++k)
          for (int64_t i = 0; i < OH; ++i)
            for (int64_t j = 0; j < OW; ++j) {
              double sum = 0;
              if (out[b * K + k]) {
                sum = bias[k];
                for (int64_t c = 0; c < C; ++c)
                  for (int64_t u = 0; u < kh; ++u)
                    for (int64_t v = 0; v < kw; ++v) {
                      int64_t p = i * sh + u * dh - ph, q = j * sw + v * dw - pw;
                      if (in[b * C + c] && p >= 0 && p < H && q >= 0 && q < W)
                        sum += w[((k * C + c) * kh + u) * kw + v] * x[((b * C + c) * H + p) * W + q];
                    }
              }
              int64_t place = ((b * K + k) * OH + i) * OW + j;
              if (has_add) sum += add[place];
              if (relu && sum < 0) sum = 0;
              if (!(std::fabs(sum - y[place]) < 1e-4)) {
                std::printf("round %d level %d: %g instead of %g\n", round, level, y[place], sum);
                return 1;
              }
            }
    }
  }
  for (int round = 0; round < 200; ++round) {  // what an exit reads
    int64_t B = pick(1, 3), C = pick(1, 5), H = pick(1, 20), W = pick(1, 20), th = pick(1, H), tw = pick(1, W);
    int64_t OH = H / th, OW = W / tw, numbers[6] = {B * C, C, H, W, th, tw};
    auto x = noise(B * C * H * W), scale = noise(C), shift = noise(C), tiles = noise(B * C * OH * OW), means = noise(B * C);
    headgate_read_planes(x.get(), scale.get(), shift.get(), tiles.get(), means.get(), numbers, 1 + round % 2);
    for (int64_t plane = 0; plane < B * C; ++plane) {
      double mean = 0;
      for (int64_t p = 0; p < H * W; ++p) mean += x[plane * H * W + p] / static_cast<double>(H * W);
      bool same = std::fabs(mean - means[plane]) < 1e-4;
      for (int64_t i = 0; i < OH; ++i)
        for (int64_t j = 0; j < OW; ++j) {
          double sum = 0;
          for (int64_t u = 0; u < th; ++u)
            for (int64_t v = 0; v < tw; ++v)
              sum += std::max(0.0f, scale[plane % C] * x[(plane * H + i * th + u) * W + j * tw + v] + shift[plane % C]);
          same &= std::fabs(sum / (th * tw) - tiles[(plane * OH + i) * OW + j]) < 1e-4;
        }
      if (!same) {
        std::printf("round %d: an exit reads something else\n", round);
        return 1;
      }
    }
  }
  for (int round = 0; round < 100; ++round) {  // pooling and gates: nothing beyond the ends
    int64_t P = pick(1, 6), H = pick(2, 12), W = pick(2, 12), k = pick(1, 2), s = pick(1, 2), p = pick(0, k / 2);
    int64_t OH = (H + 2 * p - k) / s + 1, OW = (W + 2 * p - k) / s + 1;
    auto x = noise(P * H * W), y = noise(P * OH * OW);
    int64_t numbers[11] = {P, H, W, OH, OW, k, k, s, s, p, p};
    headgate_max_pool(x.get(), y.get(), numbers, 1 + round % 2);
    int64_t hidden = pick(1, 20), sizes[2] = {pick(1, 90), pick(1, 5)}, gates = sizes[0] + sizes[1], groups[3] = {0, 1, -1};
    auto w1 = noise(hidden * P), b1 = noise(hidden), w2 = noise(hidden * gates), b2 = noise(gates);
    std::unique_ptr<uint8_t[]> first(new uint8_t[sizes[0]]), second(new uint8_t[sizes[1]]), open(new uint8_t[P]());
    uint8_t immortal[2] = {1, 0}, *out[2] = {first.get(), second.get()};
    headgate_gate_masks(x.get(), round % 3 ? open.get() : nullptr, P, w1.get(), b1.get(), w2.get(), b2.get(), 1, P, H * W,
                        hidden, sizes, immortal, 2, groups, round % 2 ? 3 : 0, 0.0f, out, 1 + round % 2);
    // the same by a tape, and a convolution whose outputs the first mask opens
    std::unique_ptr<uint8_t[]> masks(new uint8_t[gates]);
    auto w = noise(sizes[0] * P), made = noise(sizes[0] * H * W), expected = noise(sizes[0] * H * W);
    int64_t shape[15] = {1, P, H, W, sizes[0], H, W, 1, 1, 1, 1, 0, 0, 1, 1};
    headgate_conv2d(x.get(), w.get(), nullptr, nullptr, expected.get(), nullptr, 0, first.get(), sizes[0], shape, 1, 0, 1, -1);
    char* slots[3] = {reinterpret_cast<char*>(x.get()), reinterpret_cast<char*>(masks.get()), reinterpret_cast<char*>(made.get())};
    auto at = [](const void* place) { return reinterpret_cast<int64_t>(place); };
    std::vector<int64_t> tape = {1, 0, 0, -1, round % 3 ? at(open.get()) : 0, P, -1, at(w1.get()), -1, at(b1.get()), -1,
                                 at(w2.get()), -1, at(b2.get()), 1, P, H * W, hidden, -1, at(sizes), -1, at(immortal), -1,
                                 at(groups), round % 2 ? 3 : 0, 0, 2, 1, 0, 1, sizes[0],
                                 0, 0, 0, -1, at(w.get()), -1, 0, -1, 0, 2, 0, -1, 0, 0, 1, 0, sizes[0], 1, 0};
    tape.insert(tape.end(), shape, shape + 15);
    int64_t still[3] = {0, 0, 0};
    if (headgate_run(tape.data(), tape.size(), slots, 3, round % 5 ? nullptr : still, 1, 1 + round % 2) || std::memcmp(masks.get(), first.get(), sizes[0]) ||
        std::memcmp(masks.get() + sizes[0], second.get(), sizes[1]) ||
        std::memcmp(made.get(), expected.get(), sizeof(float) * sizes[0] * H * W)) {
      std::printf("round %d: a tape does something else\n", round);
      return 1;
    }
  }
  std::printf("same\n");
  return 0;
}
