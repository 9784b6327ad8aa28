// SPDX-License-Identifier: Apache-2.0
#include "watch/flight_memory.h"

#include "base/build_id.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

constexpr size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr size_t kFlightPage = whole_pages(sizeof(FlightPage));

// Returns a hash of the build id, because the layout of the memory differs between builds.
uint64_t magic() {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char* c = build_id(); *c != '\0'; ++c) {
    hash = (hash ^ static_cast<unsigned char>(*c)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace

const char* name_of(EventKind kind) {
  constexpr const char* kNames[] = {"submit", "negotiated", "launched", "done",
                                    "error",  "peer died",  "wait",     "stage",
                                    "reduce", "consume",    "cycle"};
  const auto i = static_cast<size_t>(kind);
  return i < sizeof(kNames) / sizeof(*kNames) ? kNames[i] : "unknown";
}

const char* name_of(LifeState state) {
  constexpr const char* kNames[] = {"running", "left", "failed", "died"};
  const auto i = static_cast<size_t>(state);
  return i < sizeof(kNames) / sizeof(*kNames) ? kNames[i] : "unknown";
}

void add_line(Stamped<FlightText>& lines, const std::string& text) {
  FlightText whole{};
  if (const auto seen = lines.read()) whole = seen->value;
  std::string line = (whole.length == 0 ? "" : "\n") + text;
  if (whole.length == 0) line.resize(std::min(line.size(), FlightText::kBytes));
  if (line.size() > FlightText::kBytes - whole.length) return;
  std::memcpy(whole.text + whole.length, line.data(), line.size());
  whole.length += line.size();
  lines.write(whole.length, whole);  // the length serves as the number, which must grow
}

size_t FlightMemory::pages_begin(int ranks) {
  constexpr size_t kHeader = rounded(sizeof(Header), alignof(Lateness));
  return whole_pages(kHeader + static_cast<size_t>(ranks) * sizeof(Lateness));
}

size_t FlightMemory::bytes_needed(int local_ranks, int ranks) {
  return pages_begin(ranks) + static_cast<size_t>(local_ranks) * kFlightPage;
}

void FlightMemory::prepare() {
  const Header header{magic(), local_ranks_, ranks_};
  std::memcpy(memory_, &header, sizeof(header));
}

// Limits for attach(), because a process that belongs to another user may have written any numbers into the header.
constexpr int kMostLocalRanks = 1024;
constexpr int kMostRanks = 1 << 20;

std::optional<FlightMemory> FlightMemory::attach(std::byte* memory, size_t bytes) {
  if (bytes < sizeof(Header)) return std::nullopt;
  Header header{};
  std::memcpy(&header, memory, sizeof(header));
  const bool counted = header.local_ranks >= 1 && header.local_ranks <= kMostLocalRanks &&
                       header.ranks >= header.local_ranks && header.ranks <= kMostRanks;
  if (header.magic != magic() || !counted) return std::nullopt;
  if (bytes < bytes_needed(header.local_ranks, header.ranks)) return std::nullopt;
  return FlightMemory(memory, header.local_ranks, header.ranks);
}

FlightPage& FlightMemory::page(int local) const {
  std::byte* first = memory_ + pages_begin(ranks_);
  return *reinterpret_cast<FlightPage*>(first + static_cast<size_t>(local) * kFlightPage);
}

Lateness& FlightMemory::lateness(Rank rank) const {
  std::byte* first = memory_ + rounded(sizeof(Header), alignof(Lateness));
  return reinterpret_cast<Lateness*>(first)[rank];
}

}  // namespace farandole
