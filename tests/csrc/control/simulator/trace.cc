// SPDX-License-Identifier: Apache-2.0
// Messages as text, for whoever looks for the reason of a failed seed.
#include <cstdio>

#include "control/simulator/simulator.h"

namespace farandole::simulation {
namespace {

std::string text_of(const CallKey& key) {
  std::string what = key.named() ? "'" + key.name + "'" : "unnamed " + std::to_string(key.sequence);
  return what + " in set " + std::to_string(key.set);
}

std::string text_of(const Request& request) {
  std::string text = std::string(name_of(request.signature.op)) + " " +
                     farandole::text_of(request.signature.shape);
  if (request.group.empty()) return text;
  return text + " of group '" + request.group + "'";
}

std::string call(uint32_t id, uint64_t sequence) {
  return " " + std::to_string(id) + "/" + std::to_string(sequence);
}

std::string numbers(const IdRuns& ids) {
  std::string text;
  ids.for_each([&](uint32_t id) { text += " " + std::to_string(id); });
  return text;
}

struct Text {
  std::string operator()(const Ready& r) const {
    if (r.id != 0) return "ready" + call(r.id, r.sequence);
    CallKey key{r.request.set, r.request.name, r.sequence};
    return "ready " + text_of(key) + ": " + text_of(r.request);
  }
  std::string operator()(const Refuse& r) const { return "refuse " + text_of(r.key); }
  std::string operator()(const Join& r) const { return "join " + std::to_string(r.set); }
  std::string operator()(const Done& r) const {
    return "done " + std::to_string(r.bucket) + " in set " + std::to_string(r.set);
  }
  std::string operator()(const Forgot& r) const { return "forgot " + std::to_string(r.id); }
  std::string operator()(const Leave& r) const { return r.failed ? "leave: " + r.text : "leave"; }
  std::string operator()(const StackReport& r) const { return "is " + r.text; }
  std::string operator()(const Post& r) const {
    return "post " + std::to_string(r.number) + ", tag " + std::to_string(r.request.tag) +
           ", peer " + std::to_string(r.request.peer) + ": " + text_of(r.request);
  }
  std::string operator()(const Expedite&) const { return "expedite"; }
  std::string operator()(const UseGpu& r) const { return "uses " + r.name; }
  std::string operator()(const Inquire& r) const { return "inquire " + text_of(r.key); }

  std::string operator()(const Lost& r) const { return "lost: " + r.failure.text; }
  std::string operator()(const ReadyMany& r) const { return "ready for" + numbers(r.ids); }

  std::string operator()(const Define& e) const {
    CallKey key{e.request.set, e.request.name, 0};
    return "define " + std::to_string(e.id) + " = " + text_of(key) + ": " + text_of(e.request);
  }
  std::string operator()(const Forget& e) const { return "forget " + std::to_string(e.id); }
  std::string operator()(const Run& e) const {
    std::string text = "run " + std::to_string(e.bucket) + " in set " + std::to_string(e.set) + ":";
    for (const Item& item : e.items) text += call(item.id, item.sequence);
    return e.plain.empty() ? text : text + "; plain" + numbers(e.plain);
  }
  std::string operator()(const Result& e) const {
    return (e.absent ? "absent" : "result") + call(e.id, e.sequence);
  }
  std::string operator()(const Fail& e) const {
    std::string text = "fail " + text_of(e.key) + ": " + e.failure.text;
    return e.unheard.empty() ? text : text + "; not for " + text_of_ranks(e.unheard);
  }
  std::string operator()(const Joined& e) const {
    return "joined " + std::to_string(e.set) + ", unnamed from " + std::to_string(e.next_sequence);
  }
  std::string operator()(const OpenSet& e) const {
    return "open " + std::to_string(e.set) + " of " + text_of_ranks(e.ranks) + " for " +
           text_of(e.key);
  }
  std::string operator()(const CloseSet& e) const { return "close " + std::to_string(e.set); }
  std::string operator()(const Abort& e) const { return "abort: " + e.failure.text; }
  std::string operator()(const Stop&) const { return "stop"; }
  std::string operator()(const SetUp& e) const {
    return "set up " + std::to_string(e.set) + " by step '" + e.step + "'";
  }
  std::string operator()(const Matched& e) const {
    return "matched in " + std::to_string(e.pair) + "/" + std::to_string(e.sequence) + ": rank " +
           std::to_string(e.sender) + "'s " + std::to_string(e.sent) + " and rank " +
           std::to_string(e.receiver) + "'s " + std::to_string(e.received);
  }
  std::string operator()(const CollectStacks& e) const {
    return "where are " + text_of_ranks(e.ranks) + "?";
  }
  std::string operator()(const Inform& e) const {
    return "rank " + std::to_string(e.to) + " reads: " + e.text;
  }
  std::string operator()(const Notice& e) const {
    return "ranks of set " + std::to_string(e.set) + " read: " + e.text;
  }
};

}  // namespace

std::string text_of(const Report& report) { return std::visit(Text{}, report); }
std::string text_of(const Entry& entry) { return std::visit(Text{}, entry); }

void Simulator::print(const std::string& line) const {
  std::fprintf(stderr, "%ld %s\n", static_cast<long>(now_), line.c_str());
}

}  // namespace farandole::simulation
