// SPDX-License-Identifier: Apache-2.0
// A coordinator with ranks that a test moves by hand. Every message travels as bytes.
#pragma once

#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "check.h"
#include "control/coordinator/coordinator.h"

namespace farandole {

using Log = std::vector<Entry>;

// "define run": what a log holds.
inline std::string kinds(const Log& log) {
  constexpr const char* kNames[] = {"define", "forget",   "run",       "result",  "fail",
                                    "joined", "open_set", "close_set", "abort",   "stop",
                                    "where",  "answer",   "open_gpu",  "matched", "notice"};
  std::string text;
  for (const Entry& entry : log)
    text += (text.empty() ? "" : " ") + std::string(kNames[entry.index()]);
  return text;
}

// The entries of one kind, in order.
template <class T>
std::vector<T> all(const Log& log) {
  std::vector<T> found;
  for (const Entry& entry : log) {
    if (auto* e = std::get_if<T>(&entry)) found.push_back(*e);
  }
  return found;
}

// The one entry of this kind.
template <class T>
T only(const Log& log) {
  auto found = all<T>(log);
  CHECK_EQ(found.size(), size_t{1});
  return found[0];
}

inline bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  check::fail("'" + text + "' does not contain '" + part + "'");
}

inline Request tensor(std::string name, std::vector<int64_t> shape = {1000}) {
  Request request{kWorldSet, std::move(name), {}};
  request.signature.shape = std::move(shape);
  return request;
}
inline Request in_set(Request request, SetId set) {
  request.set = set;
  return request;
}
// All its tensors are alike.
inline Request grouped(Request request, size_t tensors) {
  request.more.assign(tensors - 1, request.signature);
  return request;
}
inline Request by_members_alone(Request request) {
  request.alone = true;
  return request;
}
inline Request made_at(std::string site, Request request = tensor("")) {
  request.site = std::move(site);
  return request;
}
inline Request with_op(Request request, Op op) {
  request.signature.op = op;
  if (traits_of(op).ragged()) request.signature.shape[0] = -1;
  return request;
}
inline Request add_set_of(std::vector<int64_t> ranks, std::string name = "add") {
  return with_op(tensor(std::move(name), std::move(ranks)), Op::kAddSet);
}
inline Request remove_set_of(SetId set, std::string name = "remove") {
  Request request = with_op(tensor(std::move(name), {}), Op::kRemoveSet);
  request.signature.root = set;
  return request;
}
inline Request form_set_of(std::vector<int64_t> ranks, std::string name = "form") {
  return by_members_alone(add_set_of(std::move(ranks), std::move(name)));
}
inline Request disband_set_of(SetId set, std::vector<int64_t> ranks, std::string name = "disband") {
  Request request = by_members_alone(remove_set_of(set, std::move(name)));
  request.signature.shape = std::move(ranks);
  return request;
}

// A rank's report that its first bucket in a lane has not ended.
inline Stuck stuck_for(int64_t seconds, std::vector<Rank> ranks, SetId set = kWorldSet,
                       bool gpu = false) {
  if (set == kWorldSet) ranks.clear();
  return {set, 1, gpu, seconds * 1'000'000'000, std::move(ranks)};
}

inline Contribution input() { return {true, false, 0, {}, {}}; }
inline Contribution no_input() { return {}; }
template <class T>
Contribution payload(const std::vector<T>& values) {
  return {true, true, 0, {}, std::as_bytes(std::span(values))};
}
template <class T>
std::vector<T> values_of(const ByteString& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

inline const Failure kBad{ErrorCode::kWrongType, "bad"};

class Job {
 public:
  explicit Job(int size) : Job(settings(size)) {}
  explicit Job(Coordinator::Settings settings) : size_(settings.size), coordinator_(settings) {}
  static Coordinator::Settings settings(int size) {
    Coordinator::Settings settings;
    settings.size = size;
    return settings;
  }
  // Calls are given up after a second.
  static Coordinator::Settings impatient(int size) {
    Coordinator::Settings impatient = settings(size);
    impatient.stall_abort_ns = 1'000'000'000;
    return impatient;
  }

  void report(Rank from, const Report& report) {
    ByteString bytes;
    encode(report, bytes);
    coordinator_.receive(from, decode_report(bytes), now_);
  }
  // As a rank does it: by id where the log has given one, and a sequence number if unnamed.
  void submit(Rank from, const Request& request, const Contribution& given = input()) {
    Ready ready;
    for (auto& [id, known] : table_) {
      bool same = known.set == request.set && known.name == request.name &&
                  same_terms(known, request) && known.site == request.site;
      if (same) ready.id = id;
    }
    if (ready.id == 0) ready.request = request;
    if (request.name.empty()) ready.sequence = next_[{from, request.set}]++;
    ready.contribution = given;
    ready.more.assign(request.more.size(), given);
    report(from, ready);
  }
  void submit_all(const Request& request, const Contribution& given = input()) {
    for (Rank r = 0; r < size_; ++r) submit(r, request, given);
  }

  // Calls of a bucket as the ranks take them: all as items.
  Log publish() {
    Log log;
    coordinator_.publish(log);
    for (Entry& entry : log) {
      ByteString bytes;
      encode(entry, bytes);
      entry = decode_entry(bytes);
      if (auto* define = std::get_if<Define>(&entry)) table_[define->id] = define->request;
      if (auto* forget = std::get_if<Forget>(&entry)) table_.erase(forget->id);
      if (auto* run = std::get_if<Run>(&entry)) list_all(*run);
    }
    return log;
  }
  // All ranks make a set of these.
  SetId add_set(const std::vector<int64_t>& ranks) {
    submit_all(add_set_of(ranks), no_input());
    return only<OpenSet>(publish()).set;
  }
  // What ranks report, a word each, then what is published: "0+x" submits x, "0!x" refuses it, "0." joins, "0/" leaves;
  // "*" stands for all ranks.
  Log play(const std::string& words) {
    std::istringstream all(words);
    for (std::string word; all >> word;) {
      const std::string name = word.substr(2);
      for (Rank r = 0; r < size_; ++r) {
        if (word[0] != '*' && word[0] != '0' + r) continue;
        switch (word[1]) {
          case '+': submit(r, tensor(name)); break;
          case '!': report(r, Refuse{{kWorldSet, name, 0}, kBad}); break;
          case '.': report(r, Join{kWorldSet}); break;
          case '/': report(r, Leave{false, "", false}); break;
          default: check::fail(word);
        }
      }
    }
    return publish();
  }
  // All ranks have seen the log and taken up their unnamed calls where it says.
  void resume(const Joined& joined) {
    for (Rank r = 0; r < size_; ++r) next_[{r, joined.set}] = joined.next_sequence;
  }

  void at(int64_t seconds) { now_ = seconds * 1'000'000'000; }
  Log tick() {
    coordinator_.tick(now_);
    return publish();
  }
  Log tick(int64_t seconds) { return at(seconds), tick(); }

  // The number of a host of all ranks.
  int host_of_all() { return coordinator_.add_group(numbers_below(size_)); }
  std::vector<std::string> notices() { return coordinator_.take_notices(); }
  // The only one.
  std::string notice() {
    const std::vector<std::string> all = notices();
    CHECK_EQ(all.size(), 1);
    return all[0];
  }
  Coordinator& coordinator() { return coordinator_; }
  const std::map<uint32_t, Request>& table() const { return table_; }

 private:
  void list_all(Run& run) {
    run.plain.for_each([&](uint32_t id) { run.items.push_back(Item{id}); });
    run.plain.clear();
  }

  int size_;
  Coordinator coordinator_;
  int64_t now_ = 0;
  std::map<uint32_t, Request> table_;
  std::map<std::pair<Rank, SetId>, uint64_t> next_;
};

}  // namespace farandole
