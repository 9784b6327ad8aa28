// SPDX-License-Identifier: Apache-2.0
// Every loop of every target this CPU can run, bit for bit against the reference.
#include "kernels/kernels.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/kernels_reference.h"

namespace {

using namespace farandole;
using kernels::Factors;
using reference::Bytes;
using reference::Case;
using reference::put;
using reference::random_input;

constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

std::string text_of(const Case& c, const char* target, size_t n) {
  return std::string(target) + " " + name_of(c.dtype) + " " + name_of(c.op) + ", " +
         std::to_string(n) + " inputs of " + std::to_string(c.count) + ", factors " +
         std::to_string(c.factors.pre) + " " + std::to_string(c.factors.post) + " / " +
         std::to_string(c.factors.divisor);
}

// A copy of `data` at an odd address, between guards that must survive.
class Guarded {
 public:
  Guarded(const Bytes& data, size_t shift) : size_(data.size()), shift_(kGuard + shift) {
    bytes_.assign(size_ + shift_ + kGuard, kMark);
    if (size_ > 0) std::memcpy(at(), data.data(), size_);
  }
  char* at() { return bytes_.data() + shift_; }
  Bytes value() { return Bytes(at(), at() + size_); }
  bool intact() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < shift_ || i >= shift_ + size_) && bytes_[i] != kMark) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr char kMark = 0x5a;
  size_t size_, shift_;
  Bytes bytes_;
};

// `in_place` is the input that is also the output, or -1.
void compare(const Case& c, const std::vector<Bytes>& inputs, const Bytes& expected, size_t shift,
             int in_place) {
  for (const char* target : kernels::targets_available()) {
    std::vector<Guarded> copies;
    for (size_t q = 0; q < inputs.size(); ++q) copies.emplace_back(inputs[q], q * shift);
    Guarded separate(Bytes(expected.size(), 0x11), shift);
    std::vector<const void*> pointers;
    for (Guarded& copy : copies) pointers.push_back(copy.at());
    Guarded& out = in_place < 0 ? separate : copies[static_cast<size_t>(in_place)];
    kernels::select_target(target);
    kernels::reduce(c.dtype, c.op, out.at(), pointers.data(), static_cast<int>(pointers.size()),
                    c.count, c.factors);
    if (out.value() != expected) check::fail("wrong bits: " + text_of(c, target, inputs.size()));
    if (!out.intact()) check::fail("wrote outside: " + text_of(c, target, inputs.size()));
  }
}

std::vector<Factors> factors_for(const Case& c, int n) {
  if (c.op == ReduceOp::kAverage) return {{1, 1, n}, {1, 1, 8}, {0.5, 1, n}, {1, -1.7, n}};
  if (c.dtype == DType::kBool) return {{}};
  return {{}, {1, 0.3, 1}, {-0.7, 1, 1}, {1e30, 1e-30, 1}};
}

void check_dtype(DType dtype, ReduceOp op, std::mt19937_64& random) {
  for (const size_t count : {0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4097}) {
    for (int n = 1; n <= 5; ++n) {
      if (count >= 1000 && n != 3) continue;
      std::vector<Bytes> inputs;
      for (int q = 0; q < n; ++q) inputs.push_back(random_input(dtype, count, random));
      Case c{dtype, op, count, {}};
      for (const Factors& factors : factors_for(c, n)) {
        c.factors = factors;
        const bool copied = n == 1 && factors.pre == 1 && factors.post == 1 && factors.divisor == 1;
        const Bytes expected = copied ? inputs[0] : reference::reduce(c, inputs);
        compare(c, inputs, expected, 0, -1);
        compare(c, inputs, expected, 3, -1);
        compare(c, inputs, expected, 0, static_cast<int>(count) % n);
      }
    }
  }
}

// Through partials of inputs [0, split) and [split, n), for each split.
void check_split(const Case& c, const std::vector<Bytes>& inputs, const Bytes& expected) {
  const DType wide = kernels::partial_dtype(c.dtype, c.op, c.factors);
  std::vector<const void*> pointers;
  for (const Bytes& input : inputs) pointers.push_back(input.data());
  const int n = static_cast<int>(inputs.size());
  for (int split = 1; split < n; ++split) {
    std::vector<Bytes> partials(2, Bytes(c.count * size_of(wide)));
    kernels::reduce_to_partial(c.dtype, c.op, partials[0].data(), pointers.data(), split, c.count,
                               c.factors);
    kernels::reduce_to_partial(c.dtype, c.op, partials[1].data(), pointers.data() + split,
                               n - split, c.count, c.factors);
    const void* const both[] = {partials[0].data(), partials[1].data()};
    Bytes out(expected.size());
    kernels::reduce_partials(c.dtype, c.op, out.data(), both, 2, c.count, c.factors);
    if (out != expected)
      check::fail("wrong bits in two steps: " + text_of(c, kernels::target(), 4));
  }
}

template <class T>
T reduced(DType dtype, ReduceOp op, std::vector<T> values, const Factors& factors = {}) {
  std::vector<const void*> inputs;
  for (const T& value : values) inputs.push_back(&value);
  T out;
  kernels::reduce(dtype, op, &out, inputs.data(), static_cast<int>(inputs.size()), 1, factors);
  return out;
}

}  // namespace

TEST(every_dtype_and_op_matches_the_reference_on_every_target) {
  std::mt19937_64 random(20240613);
  for (int32_t d = 0; d < kDTypeCount; ++d) {
    for (const ReduceOp op : kOps) {
      if (kernels::supports(DType{d}, op)) check_dtype(DType{d}, op, random);
    }
  }
}

TEST(every_16_bit_float_survives_and_every_tie_rounds_to_even) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    // x + tiny multiples of x's own last place: exact values, ties and both sides of ties.
    for (const int last_place : {0x8000, 0x0001, 0x1000, 0x0c00, 0x0401, 0x7bff}) {
      std::vector<Bytes> inputs(3, Bytes(65536 * 2));
      for (size_t i = 0; i < 65536; ++i) {
        const int exponent = static_cast<int>(i) & (dtype == DType::kFloat16 ? 0x7c00 : 0x7f80);
        const int half_place = std::max(exponent - (dtype == DType::kFloat16 ? 0x2c00 : 0x0400), 0);
        put(inputs[0], i, static_cast<uint16_t>(i));
        put(inputs[1], i, static_cast<uint16_t>(last_place));
        put(inputs[2], i, static_cast<uint16_t>(last_place == 0x8000 ? 0x8000 : half_place));
      }
      const Case c{dtype, ReduceOp::kSum, 65536, {}};
      compare(c, inputs, reference::reduce(c, inputs), 0, -1);
    }
  }
}

// Sums of any two, and float32 of every size, ties and what is too large among them.
TEST(every_8_bit_float_and_every_sum_of_two_is_rounded_once) {
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
    std::vector<Bytes> inputs(2, Bytes(65536));
    for (size_t i = 0; i < 65536; ++i) {
      put(inputs[0], i, static_cast<uint8_t>(i));
      put(inputs[1], i, static_cast<uint8_t>(i >> 8));
    }
    const Case c{dtype, ReduceOp::kSum, 65536, {}};
    compare(c, inputs, reference::reduce(c, inputs), 0, -1);
  }
}

template <class Format>
void check_rounding(DType dtype) {
  std::mt19937_64 random(8);
  constexpr size_t kCount = 100'003;
  std::vector<float> wide(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const auto exponent = static_cast<uint32_t>(100 + random() % 50);
    const auto mantissa = static_cast<uint32_t>(random()) & (i % 2 ? 0x7fffff : 0x780000);
    const uint32_t bits = exponent << 23 | mantissa | static_cast<uint32_t>(i % 3 == 0) << 31;
    std::memcpy(&wide[i], &bits, sizeof bits);
  }
  for (const char* target : kernels::targets_available()) {
    kernels::select_target(target);
    std::vector<uint8_t> out(kCount);
    const void* const partials[] = {wide.data()};
    kernels::reduce_partials(dtype, ReduceOp::kSum, out.data(), partials, 1, kCount, {});
    for (size_t i = 0; i < kCount; ++i) CHECK_EQ(out[i], Format::encode(wide[i]));
  }
  kernels::select_target("");
}

TEST(float32_becomes_the_nearest_8_bit_float) {
  check_rounding<reference::Float8E4M3FN>(DType::kFloat8E4M3FN);
  check_rounding<reference::Float8E5M2>(DType::kFloat8E5M2);
}

TEST(reductions_give_known_values) {
  CHECK_EQ(reduced<uint8_t>(DType::kUInt8, ReduceOp::kSum, {200, 100}), 44);
  CHECK_EQ(reduced<uint8_t>(DType::kUInt8, ReduceOp::kAverage, {200, 100}, {1, 1, 2}), 150);
  CHECK_EQ(reduced<int32_t>(DType::kInt32, ReduceOp::kAverage, {-3, -4}, {1, 1, 2}), -3);
  CHECK_EQ(reduced<int8_t>(DType::kInt8, ReduceOp::kSum, {100, 100}, {1, 0.5, 1}), 100);
  CHECK_EQ(reduced<int8_t>(DType::kInt8, ReduceOp::kMin, {-100, 3}, {1, 2, 1}), -128);
  CHECK_EQ(reduced<int64_t>(DType::kInt64, ReduceOp::kSum, {1}, {NAN, 1, 1}), 0);
  CHECK_EQ(reduced<int64_t>(DType::kInt64, ReduceOp::kMax, {5, 7}, {1, 1e300, 1}), INT64_MAX);
  CHECK_EQ(reduced<float>(DType::kFloat32, ReduceOp::kAverage, {1, 2, 4}, {1, 1, 3}), 7.0f / 3);
  // 2048 + 1 + 1 is 2048 in 16 bits, 2050 when accumulated in 32.
  CHECK_EQ(reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum, {0x6800, 0x3c00, 0x3c00}), 0x6801);
  // 256 + 192 is 448, the largest float8_e4m3fn; 17 more is beyond it, and 16 a tie with what would be the next one.
  CHECK_EQ(reduced<uint8_t>(DType::kFloat8E4M3FN, ReduceOp::kSum, {0x78, 0x74}), 0x7e);
  CHECK_EQ(reduced<uint8_t>(DType::kFloat8E4M3FN, ReduceOp::kSum, {0x78, 0x74, 0x58}), 0x7e);
  CHECK_EQ(reduced<uint8_t>(DType::kFloat8E4M3FN, ReduceOp::kSum, {0x78, 0x74, 0x58, 0x38}), 0x7f);
  CHECK_EQ(reduced<uint8_t>(DType::kFloat8E4M3FN, ReduceOp::kAverage, {0x7e, 0x7e}, {1, 1, 2}),
           0x7e);
  CHECK_EQ(reduced<uint8_t>(DType::kFloat8E5M2, ReduceOp::kSum, {0xfb, 0xfb}), 0xfc);
  CHECK(std::isnan(reduced<double>(DType::kFloat64, ReduceOp::kMin, {1, NAN, 0})));
  CHECK(std::isnan(reduced<double>(DType::kFloat64, ReduceOp::kMax, {NAN, 1})));
  CHECK(std::signbit(reduced<float>(DType::kFloat32, ReduceOp::kMax, {-0.0f, 0.0f})));
  CHECK(std::signbit(reduced<float>(DType::kFloat32, ReduceOp::kSum, {-0.0f, -0.0f})));
  CHECK_EQ(reduced<float>(DType::kFloat32, ReduceOp::kSum, {1e-45f, 1e-45f}), 2 * 1e-45f);
}

TEST(identities_change_nothing) {
  std::mt19937_64 random(7);
  for (int32_t d = 0; d < kDTypeCount; ++d) {
    const DType dtype{d};
    for (const ReduceOp op : kOps) {
      if (!kernels::supports(dtype, op)) continue;
      Bytes x = random_input(dtype, 257, random), identity = x, out(x.size());
      kernels::fill_identity(dtype, op, identity.data(), 257);
      const Case c{dtype, op, 257, {}};
      const void* inputs[] = {x.data(), identity.data()};
      kernels::reduce(dtype, op, out.data(), inputs, 2, 257, {});
      if (op == ReduceOp::kSum || op == ReduceOp::kAverage) {
        CHECK(identity == Bytes(x.size()));
        CHECK(out == reference::reduce(c, {x, identity}));  // -0 + 0 is 0
      } else {
        CHECK(out ==
              reference::reduce({dtype, ReduceOp::kMax, 257, {}}, {x, x}));  // x, NaNs made alike
      }
    }
  }
}

TEST(unsupported_dtypes_and_ops_are_refused) {
  for (int32_t d = 0; d < kDTypeCount; ++d) {
    const DType dtype{d};
    const bool complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
    const bool sums = dtype != DType::kBool;
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      CHECK_EQ(kernels::supports(dtype, op), sums);
    }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      CHECK_EQ(kernels::supports(dtype, op), !complex);
    }
    CHECK(!kernels::supports(dtype, ReduceOp::kAdasum));
  }
  CHECK_THROWS(reduced<uint8_t>(DType::kBool, ReduceOp::kSum, {1, 1}), ErrorCode::kInvalidArgument);
  CHECK_THROWS(reduced<uint8_t>(DType::kBool, ReduceOp::kMin, {1, 1}, {2, 1, 1}),
               ErrorCode::kInvalidArgument);
  CHECK_THROWS(reduced<float>(DType::kFloat32, ReduceOp::kSum, {}), ErrorCode::kInvalidArgument);
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  CHECK_EQ(reduced<int32_t>(DType::kInt32, ReduceOp::kAverage, {1 - (1 << 30), -(1 << 30)},
                            {1, 1, kMost}),
           -1);
  for (const int64_t divisor : {int64_t{0}, kMost + 1}) {
    CHECK_THROWS(reduced<float>(DType::kFloat32, ReduceOp::kSum, {1}, {1, 1, divisor}),
                 ErrorCode::kInvalidArgument);
  }
}

TEST(targets_are_chosen_by_name) {
  const std::vector<const char*> names = kernels::targets_available();
  CHECK_EQ(std::string(names.front()), "baseline");
  for (const char* name : names) {
    kernels::select_target(name);
    CHECK_EQ(std::string(kernels::target()), name);
  }
  CHECK_THROWS(kernels::select_target("sse9"), ErrorCode::kInvalidArgument);
  CHECK_EQ(std::string(kernels::target()), names.back());
  kernels::select_target("baseline");
  kernels::select_target("");
  CHECK_EQ(std::string(kernels::target()), names.back());
}

// By groups of inputs, in every way of splitting them in two: nothing is rounded or cut off in between.
TEST(two_steps_give_what_one_step_gives) {
  std::mt19937_64 random(77);
  for (const char* target : kernels::targets_available()) {
    kernels::select_target(target);
    for (int32_t d = 0; d < kDTypeCount; ++d) {
      for (const ReduceOp op : kOps) {
        const DType dtype{d};
        if (!kernels::supports(dtype, op)) continue;
        const bool associates =  // else by group, which the reference for one step cannot tell
            !reference::is_float(dtype) || op == ReduceOp::kMin || op == ReduceOp::kMax;
        for (const size_t count : {1, 15, 33, 9000}) {
          std::vector<Bytes> inputs;
          for (int q = 0; q < 4; ++q) inputs.push_back(random_input(dtype, count, random));
          Case c{dtype, op, count, {}};
          for (const Factors& factors : factors_for(c, 4)) {
            c.factors = factors;
            if (associates) check_split(c, inputs, reference::reduce(c, inputs));
          }
        }
      }
    }
  }
  kernels::select_target("");
}

// 2048 + 1 is no float16, and 2^24 + 1 no float32: the first sum needs float32 partials.
TEST(partial_sums_of_16_bit_floats_are_float32) {
  using Half = reference::SmallFloat<10, -14>;
  using Brain = reference::SmallFloat<7, -126>;
  const auto sum = [](DType dtype, std::vector<uint16_t> values, const Factors& factors) {
    float partials[2];
    const void* const first[] = {&values[0], &values[1]};
    const void* const second[] = {&values[2], &values[3]};
    const void* const both[] = {&partials[0], &partials[1]};
    kernels::reduce_to_partial(dtype, ReduceOp::kAverage, &partials[0], first, 2, 1, factors);
    kernels::reduce_to_partial(dtype, ReduceOp::kAverage, &partials[1], second, 2, 1, factors);
    uint16_t out = 0;
    kernels::reduce_partials(dtype, ReduceOp::kAverage, &out, both, 2, 1, factors);
    return out;
  };
  const std::vector<uint16_t> halves = {Half::encode(2048), Half::encode(1), Half::encode(-2048),
                                        Half::encode(0)};
  CHECK_EQ(Half::decode(sum(DType::kFloat16, halves, {})), 1.0f);
  CHECK_EQ(Half::decode(sum(DType::kFloat16, halves, {2.0, 3.0, 4})), 1.5f);
  const std::vector<uint16_t> brains = {Brain::encode(256), Brain::encode(1), Brain::encode(-256),
                                        Brain::encode(0)};
  CHECK_EQ(Brain::decode(sum(DType::kBFloat16, brains, {1, 1, 4})), 0.25f);
  const std::vector<uint16_t> overflow = {Half::encode(60000), Half::encode(60000),
                                          Half::encode(-60000), Half::encode(-59968)};
  CHECK_EQ(Half::decode(sum(DType::kFloat16, overflow, {})), 32.0f);
}
