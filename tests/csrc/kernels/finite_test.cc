// SPDX-License-Identifier: Apache-2.0
// The scan of results for values that are not finite.
#include "kernels/kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"

namespace farandole::kernels {
namespace {

template <class T>
void check_every_position(DType dtype, const std::vector<T>& good, const std::vector<T>& bad) {
  for (size_t n : {size_t{0}, size_t{1}, size_t{7}, size_t{2048}, size_t{5001}}) {
    std::vector<T> data(n);
    for (size_t i = 0; i < n; ++i) data[i] = good[i % good.size()];
    CHECK_EQ(first_not_finite(dtype, data.data(), n), n);
    for (size_t at = 0; at < n; at += 1 + n / 9) {
      for (T value : bad) {
        const T before = data[at];
        data[at] = value;
        CHECK_EQ(first_not_finite(dtype, data.data(), n), at);
        data[at] = before;
      }
    }
  }
}

template <class T>
void check_type(DType dtype) {
  using Limits = std::numeric_limits<T>;
  const T nan = Limits::quiet_NaN();
  check_every_position<T>(
      dtype, {T{0}, T{-0.0}, Limits::max(), Limits::lowest(), Limits::denorm_min(), T{1.5}},
      {nan, std::copysign(nan, T{-1}), Limits::signaling_NaN(), Limits::infinity(),
       -Limits::infinity()});
}

TEST(the_first_float_that_is_not_finite_is_found) {
  check_type<float>(DType::kFloat32);
  check_type<double>(DType::kFloat64);
  check_every_position<uint16_t>(DType::kFloat16, {0x0000, 0x8000, 0x7bff, 0xfbff, 0x0001},
                                 {0x7c00, 0xfc00, 0x7c01, 0xfe00, 0xffff});
  check_every_position<uint16_t>(DType::kBFloat16, {0x0000, 0x8000, 0x7f7f, 0xff7f, 0x0001},
                                 {0x7f80, 0xff80, 0x7f81, 0xffc0, 0xffff});
  check_every_position<uint8_t>(DType::kFloat8E4M3FN, {0x00, 0x80, 0x7e, 0xfe, 0x78, 0x01},
                                {0x7f, 0xff});
  check_every_position<uint8_t>(DType::kFloat8E5M2, {0x00, 0x80, 0x7b, 0xfb, 0x01},
                                {0x7c, 0xfc, 0x7d, 0xfe, 0x7f, 0xff});
}

template <class T>
void check_complex(DType dtype) {
  std::vector<T> parts(2 * 3000, T{1});
  CHECK_EQ(first_not_finite(dtype, parts.data(), 3000), 3000);
  parts[2 * 2500 + 1] = std::numeric_limits<T>::infinity();
  CHECK_EQ(first_not_finite(dtype, parts.data(), 3000), 2500);
}

TEST(complex_numbers_are_searched_and_integers_are_not) {
  check_complex<float>(DType::kComplex64);
  check_complex<double>(DType::kComplex128);
  const std::vector<int64_t> ones(100, -1);
  for (const DType dtype : {DType::kInt64, DType::kBool}) {
    CHECK_EQ(first_not_finite(dtype, ones.data(), 100), 100);
  }
}

}  // namespace
}  // namespace farandole::kernels
