// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/nccl_files.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

namespace farandole::check {
namespace {

// Of the input that a call reads on this rank.
size_t input_bytes(const Call& call, int rank, size_t ranks) {
  if (!call.input) return 0;
  const size_t bytes = call.count * size_of(dtype_of(call.type));
  if (call.what == What::kReduceScatter) return bytes * ranks;
  if (call.what == What::kBroadcast && rank != call.peer) return 0;
  return bytes;
}

void put(std::string& text, const std::vector<Call>& calls, int rank, size_t ranks) {
  const size_t count = calls.size();
  text.append(reinterpret_cast<const char*>(&count), sizeof count);
  for (Call call : calls) {
    const auto* input = reinterpret_cast<const char*>(call.input);
    const size_t bytes = input_bytes(call, rank, ranks);
    text.append(reinterpret_cast<const char*>(&call), sizeof call);
    text.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    text.append(input, bytes);
  }
}

template <class T>
T take(const std::byte*& at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  at += sizeof value;
  return value;
}

std::vector<Call> calls_at(const std::byte*& at) {
  std::vector<Call> calls;
  for (auto count = take<size_t>(at); count > 0; --count) {
    auto call = take<Call>(at);
    const auto bytes = take<size_t>(at);
    call.input = at;
    call.output = nullptr;
    at += bytes;
    calls.push_back(call);
  }
  return calls;
}

}  // namespace

std::shared_ptr<NcclFiles> NcclFiles::join(const nccl::UniqueId& id, int rank, int ranks) {
  const char* folder = std::getenv("GPU_DOUBLE_FOLDER");
  if (!folder) return nullptr;
  std::string stem = std::string(folder) + "/nccl";
  for (size_t i = 0; i < 2 * sizeof(uint64_t); ++i) {
    stem += "-" + std::to_string(static_cast<unsigned char>(id.bytes[i]));
  }
  std::shared_ptr<NcclFiles> made(new NcclFiles(stem, rank, ranks));
  made->write(made->path("joined", rank), "");
  return made;
}

NcclFiles::NcclFiles(std::string stem, int rank, int ranks)
    : stem_(std::move(stem)), rank_(rank), ranks_(ranks) {}

std::string NcclFiles::path(const std::string& what, int rank) const {
  return stem_ + "." + what + "." + std::to_string(rank);
}

// All at once, for who looks whether it is there.
void NcclFiles::write(const std::string& path, const std::string& content) const {
  std::ofstream(path + ".part", std::ios::binary) << content;
  if (rename((path + ".part").c_str(), path.c_str()) != 0) std::abort();
}

bool NcclFiles::all_joined() const {
  for (int r = 0; r < ranks_; ++r) {
    if (access(path("joined", r).c_str(), F_OK) != 0) return false;
  }
  return true;
}

bool NcclFiles::send(int to, uint64_t number, Transfer& transfer) const {
  const std::string name = "-" + std::to_string(to) + "-" + std::to_string(number);
  if (!transfer.sent) {
    transfer.sent = true;
    write(path("sent" + name, rank_),
          {reinterpret_cast<const char*>(transfer.bytes.data()), transfer.bytes.size()});
  }
  // The receiver's word stays until it is read here.
  if (!transfer.awaited) transfer.awaited = unlink(path("awaited" + name, rank_).c_str()) == 0;
  return transfer.awaited;
}

bool NcclFiles::receive(int from, uint64_t number, Transfer& transfer) const {
  const std::string name = "-" + std::to_string(rank_) + "-" + std::to_string(number);
  if (!transfer.awaited) write(path("awaited" + name, from), "");
  transfer.awaited = true;
  if (transfer.sent) return true;
  const std::string its = path("sent" + name, from);
  std::ifstream file(its, std::ios::binary);
  if (!file) return false;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  transfer.bytes.assign(bytes, bytes + text.size());
  transfer.sent = true;
  unlink(its.c_str());
  return true;
}

bool NcclFiles::meet(uint64_t number, Launch& launch) {
  if (launch.done) return true;
  const std::string name = "launch" + std::to_string(number);
  const auto own = static_cast<size_t>(rank_);
  const auto ranks = static_cast<size_t>(ranks_);
  if (written_ == number) {
    std::string text;
    put(text, launch.calls[own], rank_, ranks);
    write(path(name, rank_), text);
    ++written_;
  }
  for (int r = 0; r < ranks_; ++r) {
    if (access(path(name, r).c_str(), F_OK) != 0) return false;
  }
  // Who has written this launch has read the one before.
  if (number > 0) unlink(path("launch" + std::to_string(number - 1), rank_).c_str());
  launch.kept.resize(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    if (r == own || !launch.kept[r].empty()) continue;
    std::ifstream file(path(name, static_cast<int>(r)), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    launch.kept[r].assign(bytes, bytes + text.size());
    const std::byte* at = launch.kept[r].data();
    launch.calls[r] = calls_at(at);
  }
  return true;
}

}  // namespace farandole::check
