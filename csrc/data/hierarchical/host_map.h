// SPDX-License-Identifier: Apache-2.0
// Says which members of a process set share a host. Hosts are in the order of their lowest members.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace farandole {

class HostMap {
 public:
  // `host_name[member]` is any number that identifies the member's host.
  explicit HostMap(const std::vector<int>& host_name) {
    std::vector<int> names;
    for (size_t member = 0; member < host_name.size(); ++member) {
      const auto found = std::find(names.begin(), names.end(), host_name[member]);
      const auto host = static_cast<size_t>(found - names.begin());
      if (found == names.end()) {
        names.push_back(host_name[member]);
        members_.emplace_back();
      }
      host_of_.push_back(static_cast<int>(host));
      local_of_.push_back(static_cast<int>(members_[host].size()));
      members_[host].push_back(static_cast<int>(member));
      stripes_ = std::max(stripes_, members_[host].size());
    }
  }

  int members() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  int host_of(int member) const { return host_of_[static_cast<size_t>(member)]; }
  int local_of(int member) const { return local_of_[static_cast<size_t>(member)]; }
  const std::vector<int>& members_of(int host) const { return members_[static_cast<size_t>(host)]; }
  // Returns the number of stripes, which is the number of members on the largest host.
  int stripes() const { return static_cast<int>(stripes_); }
  // Returns the member that moves a stripe's bytes on a host.
  int worker(int host, int stripe) const {
    const std::vector<int>& here = members_of(host);
    return here[static_cast<size_t>(stripe) % here.size()];
  }

 private:
  std::vector<int> host_of_;   // by member
  std::vector<int> local_of_;  // by member
  std::vector<std::vector<int>> members_;
  size_t stripes_ = 1;
};

}  // namespace farandole
