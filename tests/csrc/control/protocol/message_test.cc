// SPDX-License-Identifier: Apache-2.0
// Control messages: what is written is read, and nothing that is read can do harm.
#include "control/protocol/message.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>

#include "check.h"
#include "control/protocol/fields.h"
#include "control/protocol/random_messages.h"

// The largest piece of memory that anybody asked for.
static size_t largest_allocation = 0;

void* operator new(size_t bytes) {
  largest_allocation = std::max(largest_allocation, bytes);
  void* memory = std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace farandole {
namespace {

using check::Random;

constexpr size_t kReportKinds = std::variant_size_v<Report>;
constexpr size_t kEntryKinds = std::variant_size_v<Entry>;

template <class Variant>
void same_message(const Variant& a, const Variant& b) {
  CHECK_EQ(a.index(), b.index());
  std::visit(
      [&](const auto& x) { CHECK(check::same(x, std::get<std::remove_cvref_t<decltype(x)>>(b))); },
      a);
}

template <class Message>
ByteString encoded(const Message& message) {
  ByteString bytes;
  encode(message, bytes);
  return bytes;
}

// Decodes a copy of exactly this size, so that a sanitizer sees every byte read beyond it. What decodes
// is what encode() would have written.
bool decodes(const ByteString& bytes, bool is_report) {
  std::unique_ptr<std::byte[]> copy(new std::byte[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), copy.get());
  ByteView view(copy.get(), bytes.size());
  try {
    ByteString again = is_report ? encoded(decode_report(view)) : encoded(decode_entry(view));
    CHECK(again == bytes);
    return true;
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInternal);
    return false;
  }
}

// Every kind of message, many times over: visit(bytes, is it a report).
void for_messages(uint64_t seed, int rounds,
                  const std::function<void(Random&, ByteString, bool)>& visit) {
  Random random(seed);
  ByteString storage;
  for (int round = 0; round < rounds; ++round) {
    for (size_t kind = 0; kind < kReportKinds; ++kind) {
      visit(random, encoded(random_report(random, kind, storage)), true);
    }
    for (size_t kind = 0; kind < kEntryKinds; ++kind) {
      visit(random, encoded(random_entry(random, kind)), false);
    }
  }
}

}  // namespace

TEST(a_report_is_read_as_it_was_written) {
  Random random(1);
  ByteString storage;
  for (int round = 0; round < 500; ++round) {
    for (size_t kind = 0; kind < kReportKinds; ++kind) {
      Report report = random_report(random, kind, storage);
      CHECK_EQ(report.index(), kind);
      ByteString bytes = encoded(report);
      same_message(report, decode_report(bytes));
    }
  }
}

TEST(an_entry_is_read_as_it_was_written) {
  Random random(2);
  for (int round = 0; round < 500; ++round) {
    for (size_t kind = 0; kind < kEntryKinds; ++kind) {
      Entry entry = random_entry(random, kind);
      CHECK_EQ(entry.index(), kind);
      same_message(entry, decode_entry(encoded(entry)));
    }
  }
}

TEST(messages_append_to_what_is_there) {
  ByteString bytes = encoded(Report(Join{3}));
  size_t first = bytes.size();
  encode(Report(Forgot{7}), bytes);
  same_message(Report(Join{3}), decode_report(ByteView(bytes).first(first)));
  same_message(Report(Forgot{7}), decode_report(ByteView(bytes).subspan(first)));
}

TEST(a_payload_is_not_copied) {
  ByteString payload(100, std::byte{5});
  Ready ready;
  ready.id = 1;
  ready.contribution.payload = payload;
  ByteString bytes = encoded(Report(ready));
  Report report = decode_report(bytes);
  const std::byte* data = std::get<Ready>(report).contribution.payload.data();
  CHECK(data > bytes.data() && data + 100 <= bytes.data() + bytes.size());
}

TEST(large_jobs_send_smaller_inputs_in_reports) {
  CHECK_EQ(tiny_bytes(1), kTinyBytes);
  CHECK_EQ(tiny_bytes(64), kTinyBytes);
  CHECK_EQ(tiny_bytes(128), kTinyBytes / 2);
  CHECK_EQ(tiny_bytes(256), size_t{1024});
  CHECK_EQ(tiny_bytes(100'000), size_t{1024});
}

TEST(a_message_cut_anywhere_is_refused) {
  for_messages(3, 20, [](Random&, ByteString bytes, bool is_report) {
    CHECK(decodes(bytes, is_report));
    while (!bytes.empty()) {
      bytes.pop_back();
      CHECK(!decodes(bytes, is_report));
    }
  });
}

TEST(a_message_with_more_behind_it_is_refused) {
  for_messages(4, 20, [](Random& random, ByteString bytes, bool is_report) {
    bytes.push_back(static_cast<std::byte>(random.below(256)));
    CHECK(!decodes(bytes, is_report));
  });
}

// Every four bytes of every message as a huge number: a count that is believed would allocate gigabytes.
TEST(a_huge_count_is_not_believed) {
  for_messages(7, 10, [](Random&, ByteString bytes, bool is_report) {
    for (size_t at = 1; at + 4 <= bytes.size(); ++at) {
      ByteString mad = bytes;
      for (size_t i = 0; i < 4; ++i) mad[at + i] = std::byte{0x7f};
      largest_allocation = 0;
      decodes(mad, is_report);
      CHECK(largest_allocation <= 4 * bytes.size() + 256);
    }
  });
  ByteString run = encoded(Entry(Run{0, 1, std::vector<Item>(3)}));
  size_t count_at = run.size() - 3 * 24 - 4 - 4;  // no plain ones
  CHECK_EQ(run[count_at], std::byte{3});
  run[count_at] = std::byte{4};  // one more than its bytes have room for
  CHECK(!decodes(run, false));
}

TEST(only_written_values_are_read) {
  ByteString leave = encoded(Report(Leave{true, "", false}));
  leave[1] = std::byte{2};  // neither true nor false
  CHECK(!decodes(leave, true));
  ByteString abort = encoded(Entry(Abort{{ErrorCode::kStall, ""}}));
  abort[1] = std::byte{9};  // beyond the last error code
  CHECK(!decodes(abort, false));
  CHECK(!decodes(ByteString{static_cast<std::byte>(kReportKinds)}, true));
  CHECK(!decodes(ByteString{static_cast<std::byte>(kEntryKinds)}, false));
  CHECK(!decodes({}, true));
}

TEST(ids_that_follow_each_other_take_no_room) {
  IdRuns ids{7, 8, 9};
  const size_t one_run = encoded(Report(ReadyMany{ids})).size();
  for (uint32_t id = 10; id < 1000; ++id) ids.add(id);
  CHECK_EQ(encoded(Report(ReadyMany{ids})).size(), one_run);
  ids.add(7);
  ids.add(6);
  CHECK_EQ(encoded(Report(ReadyMany{ids})).size(), one_run + 2 * sizeof(IdRuns::Run));
  std::vector<uint32_t> all;
  const Report report = decode_report(encoded(Report(ReadyMany{ids})));
  std::get<ReadyMany>(report).ids.for_each([&](uint32_t id) { all.push_back(id); });
  CHECK_EQ(all.size(), size_t{995});
  CHECK(all[0] == 7 && all[992] == 999 && all[993] == 7 && all[994] == 6);
}

// Runs that encode() would not write: of no id, of id 0, too long, that go on where the one before ends.
TEST(only_runs_of_ids_that_may_be_are_read) {
  const auto reads = [](std::initializer_list<IdRuns::Run> runs) {
    ByteString bytes = encoded(Report(ReadyMany{}));
    bytes.resize(1);
    Encoder out(bytes);
    out.put(static_cast<uint32_t>(runs.size()));
    for (const IdRuns::Run& run : runs) out.put(run);
    return bytes;
  };
  const auto most = static_cast<uint32_t>(IdRuns::kMost);
  CHECK(decodes(reads({{5, 3}, {9, 1}, {1, 7}}), true));
  CHECK(decodes(reads({{5, most}}), true));
  CHECK(!decodes(reads({{5, 3}, {8, 1}}), true));
  CHECK(!decodes(reads({{5, 0}}), true));
  CHECK(!decodes(reads({{0, 3}}), true));
  CHECK(!decodes(reads({{5, most + 1}}), true));
  CHECK(!decodes(reads({{5, most}, {1, 1}}), true));
  CHECK(!decodes(reads({{UINT32_MAX, 2}}), true));
}

}  // namespace farandole
