// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/call_sites.h"

namespace farandole {
namespace {

constexpr size_t kMostTold = 64;  // each may write a flight dump; nobody reads more

}  // namespace

Failure CallSites::judge(const SetState& set, const Call& call) {
  if (call.terms().agreed()) return {};
  const RanksByValue sites = call.terms().sites(set.ranks);
  if (sites.empty()) return {};
  const std::string text =
      text_of(call.key(), call.request()) +
      " matches calls from different lines: " + text_of(sites) +
      ". Calls without a name match by their order, so the result may mix different tensors. Make "
      "such calls in the same order on all ranks, or give each a name";
  if (strict_) return {ErrorCode::kMismatch, text};
  std::set<std::string> lines;
  for (const auto& [site, ranks] : sites) lines.insert(site);
  std::string pair;
  for (const std::string& line : lines) pair += line + "\n";
  if (told_.size() < kMostTold && told_.insert(std::move(pair)).second) {
    outbox_.write(Notice{set.id, text});
  }
  return {};
}

}  // namespace farandole
