// SPDX-License-Identifier: Apache-2.0
#include "watch/flight_text.h"

#include <fcntl.h>

#include <algorithm>

#include "base/clock.h"
#include "base/collective.h"
#include "base/error.h"
#include "lib/os/process.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

// Writes the members of an event's JSON object, without the braces.
void write_members(Json& json, const FlightEvent& event, const LabelMemory& labels) {
  const Op op = event.op < kOpCount ? static_cast<Op>(event.op) : Op{};
  json.member("t", event.time_ns).member("kind", name_of(event.kind));
  json.member("set", event.set).member("thread", event.thread);
  if (event.call != 0) {
    json.member("call", event.call).member("name", labels.at(event.name));
    json.member("op", name_of(op));
    if (event.dtype < kDTypeCount) json.member("dtype", name_of(static_cast<DType>(event.dtype)));
  }
  if (event.kind == EventKind::kSubmit) {
    json.key("shape").open('[');
    const size_t fit = std::min<size_t>(event.dimensions, kRecordedDimensions);
    for (size_t i = 0; i < fit; ++i) json.value(event.shape[i]);
    json.close(']');
    if (event.site != kNoLabel) json.member("site", labels.at(event.site));
  }
  json.member("bytes", event.bytes).member("seq", event.sequence);
  const bool posted = event.kind == EventKind::kSubmit && traits_of(op).paired();
  json.member(posted ? "tag" : "bucket", event.bucket);
  json.member(posted ? "peer" : "value", event.value);
}

void write_open(Json& json, const FlightPage& page) {
  json.key("open").open('[');
  for (size_t place = 0; place < FlightPage::kOpen; ++place) {
    const int64_t call = page.open[place].load(std::memory_order_acquire);
    if (call == 0) continue;
    const auto seen = page.open_calls[place].read();
    if (!seen || seen->value.submit.call != call) continue;
    json.line().open('{').member("position", seen->value.position);
    json.member("agreed_bucket", seen->value.bucket).member("lane", seen->value.lane);
    json.member("negotiated", seen->value.negotiated_ns);
    write_members(json, seen->value.submit, page.labels);
    json.close('}');
  }
  json.close(']').line();
}

void write_histogram(Json& json, const char* name, const Histogram& histogram) {
  json.key(name).open('{');
  json.member("count", histogram.count.load()).member("sum", histogram.sum.load());
  size_t used = Histogram::kSlots;
  while (used > 0 && histogram.slots[used - 1].load() == 0) --used;
  json.key("slots").open('[');
  for (size_t i = 0; i < used; ++i) json.value(histogram.slots[i].load());
  json.close(']').close('}');
}

void write_tally(Json& json, const Tally& tally, const LabelMemory& labels) {
  json.key("counters").open('{');
  json.member("tensors_submitted", tally.submitted.load());
  json.member("tensors_done", tally.done.load());
  json.member("tensors_failed", tally.failed.load());
  json.member("bytes_done", tally.bytes.load());
  json.member("buckets_done", tally.buckets.load());
  json.member("moving_ns", tally.moving_ns.load());
  json.close('}').line();
  json.key("histograms").open('{');
  write_histogram(json, "negotiation_ns", tally.negotiation_ns);
  write_histogram(json, "wait_ns", tally.wait_ns);
  write_histogram(json, "bucket_bytes", tally.bucket_bytes);
  write_histogram(json, "bandwidth_MBps", tally.bandwidth);
  json.close('}').line();
  const bool waiting = tally.waiters.load() > 0;
  json.key("now").open('{').member("waiters", tally.waiters.load());
  json.member("waiting_for", waiting ? labels.at(tally.waiting_for.load()) : "");
  json.member("waiting_since_ns", waiting ? tally.waiting_since_ns.load() : 0);
  json.member("moving_since_ns", tally.moving_since_ns.load()).close('}').line();
}

void write_sets(Json& json, const FlightPage& page) {
  json.key("sets").open('{');
  for (const auto& slot : page.sets) {
    const uint64_t entry = slot.load(std::memory_order_acquire);
    if (entry == 0) continue;
    json.member(std::to_string(entry >> 32), page.labels.at(static_cast<uint32_t>(entry)));
  }
  json.close('}').line();
}

void write_events(Json& json, const FlightPage& page, size_t most) {
  const uint64_t end = page.recorded.load(std::memory_order_acquire);
  const uint64_t count = std::min<uint64_t>({end, FlightPage::kEvents, most});
  json.key("events").open('[');
  for (uint64_t number = end - count; number < end; ++number) {
    const auto seen = page.events[number % FlightPage::kEvents].read();
    if (!seen || seen->number != number) continue;
    json.line().open('{');
    write_members(json, seen->value, page.labels);
    json.close('}');
  }
  json.line().close(']');
}

FlightMemory attached(const Segment& segment) {
  if (const auto memory = FlightMemory::attach(segment.data(), segment.size())) return *memory;
  throw Error(ErrorCode::kInvalidArgument,
              "this build of farandole can't read this memory as flight recorders; use the "
              "installation that the job uses");
}

// Returns nullopt if the memory does not hold a plausible identity.
std::optional<FlightPage::Identity> identity_of(const FlightMemory& memory, int local) {
  const auto seen = memory.page(local).identity.read();
  if (!seen || seen->value.rank < 0 || seen->value.rank >= memory.ranks()) return std::nullopt;
  return seen->value;
}

void write_text(Json& json, const char* name, const Stamped<FlightText>& text) {
  const auto seen = text.read();
  if (!seen) return;
  const size_t length = std::min<size_t>(seen->value.length, FlightText::kBytes);
  json.member(name, std::string_view(seen->value.text, length)).line();
}

}  // namespace

void write_flight(Json& json, const FlightMemory& memory, int local, size_t events,
                  const std::string& reason) {
  const FlightPage& page = memory.page(local);
  const FlightPage::Identity who = identity_of(memory, local).value_or(FlightPage::Identity{});
  json.open('{').member("format", "farandole-flight-2").member("rank", who.rank);
  json.member("size", who.size).member("world", who.world).member("local_rank", local);
  json.member("host", host_name())
      .member("pid", who.pid)
      .member("state", name_of(page.state.load()))
      .line();
  json.member("began_ns", who.began_ns).member("now_ns", now_ns());
  json.member("epoch_minus_monotonic_ns", epoch_ns() - now_ns()).line();
  json.member("reason", reason).line();
  if (const auto seen = page.failure.read()) {
    const size_t length = std::min<size_t>(seen->value.length, FlightFailure::kTextBytes);
    json.key("failure").open('{').member("code", seen->value.code);
    json.member("text", std::string_view(seen->value.text, length)).close('}').line();
  }
  write_text(json, "story", page.story);
  write_text(json, "findings", page.findings);
  write_sets(json, page);
  write_tally(json, page.tally, page.labels);
  const Lateness& late = memory.lateness(who.rank);
  json.key("late").open('{').member("times", late.times.load()).member("ns", late.ns.load());
  json.close('}').line();
  json.member("recorded", page.recorded.load()).member("dropped", page.dropped.load()).line();
  if (events > 0) write_open(json, page);  // before the events, which show how these calls ended
  write_events(json, page, events);
  json.close('}');
}

std::vector<FlightDump> dumps_of(const FlightMemory& memory, std::span<const int> locals,
                                 const std::string& reason) {
  std::vector<FlightDump> dumps;
  for (int local : locals) {
    const auto who = identity_of(memory, local);
    if (!who) continue;
    const int64_t made_ns = epoch_ns();
    Json json;
    write_flight(json, memory, local, FlightPage::kEvents, reason);
    dumps.push_back({"flight-rank-" + std::to_string(who->rank) + ".json",
                     std::string(json.text()) + "\n", made_ns});
  }
  return dumps;
}

void write_dumps(const std::vector<FlightDump>& dumps, const std::string& folder) {
  make_folder(folder);
  for (const auto& [name, text, made_ns] : dumps) {
    write_text_file(folder + "/" + name, text, made_ns);
  }
}

FlightView::FlightView(int fd)
    : segment_(Segment::map(Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)))), memory_(attached(segment_)) {}

std::string FlightView::text(int local, size_t events) const {
  if (local < 0 || local >= local_ranks()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no local rank " + std::to_string(local));
  }
  Json json;
  write_flight(json, memory_, local, events, "");
  return json.text();
}

void FlightView::dump(const std::string& folder, const std::string& reason) const {
  write_dumps(dumps_of(memory_, numbers_below(local_ranks()), reason), folder);
}

}  // namespace farandole
