// SPDX-License-Identifier: Apache-2.0
#include "control/bootstrap/peer_info.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "base/build_id.h"
#include "base/error.h"
#include "lib/net/siphash.h"
#include "lib/os/process.h"

namespace farandole {
namespace {

// Maps each value of a field to the ranks that have this value. If there is more than one value, the ranks disagree.
using Opinions = std::map<std::string, std::vector<Rank>>;

std::string text_of(const Opinions& opinions) {
  std::string text;
  for (auto& [value, ranks] : opinions) {
    text += (text.empty() ? "" : "; ") + ("'" + value + "' on ") + text_of_ranks(ranks);
  }
  return text;
}

template <class Field>
Opinions opinions_about(std::span<const PeerInfo> peer_infos, Field&& field) {
  Opinions opinions;
  for (size_t r = 0; r < peer_infos.size(); ++r) {
    opinions[field(peer_infos[r])].push_back(static_cast<Rank>(r));
  }
  return opinions;
}

}  // namespace

ByteString PeerInfo::encode() const {
  ByteString out;
  {
    Encoder e(out);
    e.put(build), e.put(job_wide), e.put(pid), e.put(start_time);
    e.put(pid_namespace), e.put(net_namespace), e.put(boot_id);
    e.put(host), e.put(listener), e.put(sockets), e.put(static_cast<uint32_t>(tcp.hosts.size()));
    for (const std::string& host : tcp.hosts) e.put(host);
    e.put(tcp.port);
  }
  return out;
}

PeerInfo PeerInfo::decode(ByteView in) {
  Decoder d(in);
  PeerInfo c;
  c.build = d.get_string();
  c.job_wide = d.get_string();
  c.pid = d.get<int64_t>();
  c.start_time = d.get<uint64_t>();
  c.pid_namespace = d.get<uint64_t>();
  c.net_namespace = d.get<uint64_t>();
  c.boot_id = d.get_string();
  c.host = d.get_string();
  c.listener = d.get_string();
  c.sockets = d.get_string();
  c.tcp.hosts.resize(d.get_count(sizeof(uint32_t)));
  for (std::string& host : c.tcp.hosts) host = d.get_string();
  c.tcp.port = d.get<uint16_t>();
  return c;
}

PeerInfo own_peer_info(const Config& config, const UnixListener& listener, const TcpAddress& tcp) {
  PeerInfo peer_info;
  peer_info.build = build_id();
  peer_info.job_wide = job_wide_text(config);
  peer_info.pid = ::getpid();
  peer_info.start_time = process_start_time(::getpid()).value_or(0);
  peer_info.pid_namespace = pid_namespace();
  peer_info.net_namespace = net_namespace();
  peer_info.boot_id = boot_id();
  peer_info.host = host_name();
  peer_info.listener = listener.name();
  peer_info.sockets = listener.folder();
  peer_info.tcp = tcp;
  return peer_info;
}

void check_agreement(std::span<const PeerInfo> peer_infos) {
  Opinions builds = opinions_about(peer_infos, [](const PeerInfo& c) { return c.build; });
  if (builds.size() > 1) {
    throw Error(ErrorCode::kMismatch, "the ranks run different builds of farandole: " +
                                          text_of(builds) + "; install the same one everywhere");
  }
}

JobKey proof_at(const std::string& listener, const JobKey& world) {
  return siphash128(world, std::as_bytes(std::span(listener)));
}

TcpAddress way_to(const PeerInfo& peer, const PeerInfo& own) {
  TcpAddress way = peer.tcp;
  if (peer.boot_id == own.boot_id && peer.net_namespace == own.net_namespace) return way;
  std::erase_if(way.hosts, [&own](const std::string& host) {
    const bool loopback = host.starts_with("127.") || host == "::1";
    return loopback || std::ranges::find(own.tcp.hosts, host) != own.tcp.hosts.end();
  });
  return way;
}

Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos) {
  const auto place = [&](Rank rank) {
    const PeerInfo& peer_info = peer_infos[static_cast<size_t>(rank)];
    return std::tie(node[static_cast<size_t>(rank)], peer_info.sockets, peer_info.net_namespace);
  };
  Rank lowest = 0;
  while (place(lowest) != place(own)) ++lowest;
  return lowest;
}

}  // namespace farandole
