// SPDX-License-Identifier: Apache-2.0
// What a code behind each message between hosts costs: GB/s of one core for CRC-32C, by the CPU's instruction and
// without, and for SipHash-2-4, the MAC of control messages, of messages of 128 KB as TcpWire sends them. In turns; the
// median.
#include <algorithm>
#include <cstdio>
#include <span>
#include <vector>

#include "base/clock.h"
#include "kernels/crc32c.h"
#include "lib/net/siphash.h"

namespace {

using namespace farandole;

constexpr size_t kMessage = 128 * 1024;
constexpr int kMessages = 4;  // timed together: shorter than a scheduler's slice
constexpr int kTurns = 501;

volatile uint32_t sink;  // so that no sum is left out

void by_instruction(const std::vector<std::byte>& data) {
  sink = kernels::crc32c(data.data(), data.size());
}
void by_table(const std::vector<std::byte>& data) {
  sink = kernels::crc32c_by_table(data.data(), data.size());
}
void by_siphash(const std::vector<std::byte>& data) {
  sink = std::to_integer<uint32_t>(siphash128({}, data)[0]);
}

}  // namespace

int main() {
  struct Code {
    const char* name;
    void (*run)(const std::vector<std::byte>&);
    std::vector<double> rates = {};  // GB/s
  };
  Code codes[] = {
      {"crc32c", by_instruction}, {"crc32c by table", by_table}, {"siphash", by_siphash}};
  std::vector<std::byte> data(kMessage);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 131 >> 4);
  for (int turn = 0; turn < kTurns; ++turn) {
    for (Code& code : codes) {
      const int64_t begin = now_ns();
      for (int i = 0; i < kMessages; ++i) code.run(data);
      code.rates.push_back(double{kMessage} * kMessages / static_cast<double>(now_ns() - begin));
    }
  }
  std::printf("%-16s %10s %24s\n", "code", "GB/s", "of a core at 10 Gbit/s");
  for (Code& code : codes) {
    std::nth_element(code.rates.begin(), code.rates.begin() + kTurns / 2, code.rates.end());
    const double rate = code.rates[kTurns / 2];
    std::printf("%-16s %10.2f %23.1f%%\n", code.name, rate, 100 * 1.25 / rate);
  }
}
