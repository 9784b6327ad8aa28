// SPDX-License-Identifier: Apache-2.0
#include "base/config.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/logging.h"
#include "base/own_file.h"

namespace farandole {
namespace {

std::string trimmed(const std::string& text) {
  const char* blank = " \t\r";
  size_t first = text.find_first_not_of(blank);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

std::string variable_or(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

// Returns the path of the tuning file in $XDG_CONFIG_HOME or ~/.config, or "" if neither folder is known.
std::string usual_path() {
  std::string home = variable_or("HOME", "");
  std::string folder = variable_or("XDG_CONFIG_HOME", home.empty() ? "" : home + "/.config");
  return folder.empty() ? "" : folder + "/farandole/tuning.conf";
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument,
              "tuning file " + path + ": " + why +
                  "; remedy: run `farandole tune` again, or set FARANDOLE_TUNING=none");
}

constexpr bool kJobWide = true;
constexpr bool kOwn = false;

constexpr Limits between(int64_t least, int64_t most = INT64_MAX) { return {least, most, ""}; }
constexpr Limits one_of(const char* choices) { return {0, 0, choices}; }

const Variable kVariables[] = {
    {"FARANDOLE_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD", "32M",
     "bytes of tensors reduced together in one bucket; 0: one tensor per bucket", kJobWide,
     &Config::fusion_bytes},
    {"FARANDOLE_BLOCK_BYTES", "", "512K",
     "bytes of one block of the shared-memory pipeline; a few blocks should fit the L2 cache",
     kJobWide, &Config::block_bytes, between(1 << 10, 1 << 30)},
    {"FARANDOLE_STAGING_SLOTS", "", "4", "blocks that a rank may stage ahead of peers", kJobWide,
     &Config::staging_slots, between(2, 64)},
    {"FARANDOLE_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY", "8192",
     "number of tensors for which messages carry an id instead of the name", kJobWide,
     &Config::cache_capacity, between(1)},
    {"FARANDOLE_PROCESS_SETS", "", "64", "most process sets at one time, including the world",
     kJobWide, &Config::max_process_sets, between(1, 1 << 20)},
    {"FARANDOLE_STALL_WARN", "HOROVOD_STALL_CHECK_TIME_SECONDS", "10",
     "seconds that a call may wait for other ranks before a warning; 0: never warns", kJobWide,
     &Config::stall_warn},
    {"FARANDOLE_STALL_ABORT", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "300",
     "seconds that a call may wait for other ranks before it fails with StallError; 0: no limit",
     kJobWide, &Config::stall_abort},
    {"FARANDOLE_INIT_TIMEOUT", "HOROVOD_START_TIMEOUT", "60",
     "seconds that each step of init() waits for the other ranks", kJobWide, &Config::init_timeout},
    {"FARANDOLE_SHUTDOWN_TIMEOUT", "", "86400",
     "seconds that a rank waits in shutdown() or at exit for the other ranks to leave; then an "
     "error names those that have not left; 0: no limit",
     kJobWide, &Config::shutdown_timeout},
    {"FARANDOLE_TUNING", "", "",
     "file of job-wide settings, written by `farandole tune`; empty: farandole/tuning.conf in the "
     "configuration directory, if it exists; none: no file",
     kOwn, &Config::tuning},
    {"FARANDOLE_FLIGHT_DIR", "", "",
     "folder for flight recorder dumps on errors and stalls; empty: no dumps", kJobWide,
     &Config::flight_dir},
    {"FARANDOLE_CHECKPOINT_DIR", "", "",
     "folder in which elastic training keeps commits, to resume from them; empty: none", kJobWide,
     &Config::checkpoint_dir},
    {"FARANDOLE_CHECKPOINT_SECONDS", "", "10",
     "seconds between two commits written to FARANDOLE_CHECKPOINT_DIR; 0: writes every commit",
     kJobWide, &Config::checkpoint_seconds},
    {"FARANDOLE_GRACE", "", "30",
     "seconds that a rank of elastic training may run on after SIGTERM or SIGUSR1", kJobWide,
     &Config::grace},
    {"FARANDOLE_TIMELINE", "HOROVOD_TIMELINE", "",
     "file to which rank 0 writes a trace of the whole run (rank N: NAME.rankN.SUFFIX); DYNAMIC or "
     "empty: no trace before start_timeline()",
     kJobWide, &Config::timeline},
    {"FARANDOLE_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES", "0",
     "1: mark each batch of log entries in the timeline", kJobWide, &Config::timeline_mark_cycles,
     between(0, 1)},
    {"FARANDOLE_CHECK_NUMERICS", "", "0",
     "1: checks every input; a NaN or infinity fails the call on all ranks", kJobWide,
     &Config::check_numerics, between(0, 1)},
    {"FARANDOLE_CALL_SITES", "", "warn",
     "action if unnamed calls that match come from different program lines: warn, check (raises "
     "MismatchError) or off (does not record lines)",
     kJobWide, &Config::call_sites, one_of("off, warn, check")},
    {"FARANDOLE_VERIFY_EVERY", "", "1000",
     "steps between two comparisons of the ranks' models, unless the program sets verify_every; 0: "
     "never",
     kJobWide, &Config::verify_every, between(0)},
    {"FARANDOLE_PEER_TIMEOUT", "", "30",
     "seconds after which a silent connection between two hosts counts as lost", kJobWide,
     &Config::peer_timeout},
    {"FARANDOLE_WIRE", "", "auto",
     "transport of tensors between hosts: mpi, tcp (farandole's sockets), or auto (MPI if the job "
     "has one, else TCP)",
     kJobWide, &Config::wire, one_of("auto, tcp, mpi")},
    {"FARANDOLE_INTERFACE", "", "",
     "network interfaces at which other hosts reach this one, separated by commas: the start of a "
     "name (ib), =NAME, an address or a network (10.1.0.0/16); ^ before the list: all except these",
     kOwn, &Config::interface},
    {"FARANDOLE_GPU_FUSION_THRESHOLD", "", "64M",
     "like FARANDOLE_FUSION_THRESHOLD, for tensors on GPUs", kJobWide, &Config::gpu_fusion_bytes},
    {"FARANDOLE_GPU_BACKEND", "", "auto",
     "path of tensors on GPUs: nccl, host (through host memory), or auto (NCCL if all ranks have "
     "it, else host)",
     kJobWide, &Config::gpu_backend, one_of("auto, nccl, host")},
    {"FARANDOLE_SHARED_GPU", "", "error",
     "action if two ranks use one GPU: error, host (sends tensors through host memory) or nccl",
     kJobWide, &Config::shared_gpu, one_of("error, host, nccl")},
    {"FARANDOLE_GPU_ORDER", "", "background",
     "when buckets on GPUs are launched: background (at any time, by the background thread) or "
     "program (only while the program waits, so its other NCCL work keeps its order)",
     kJobWide, &Config::gpu_order, one_of("background, program")},
    {"FARANDOLE_NCCL_ALGO", "", "", "value for NCCL_ALGO if that is not set: ring, tree, ...",
     kJobWide, &Config::nccl_algo},
    {"FARANDOLE_CUDA_LIBRARY", "", "", "path of libcuda.so.1; empty: the dynamic loader finds it",
     kOwn, &Config::cuda_library},
    {"FARANDOLE_NCCL_LIBRARY", "", "",
     "path of libnccl.so.2; empty: the copy that the process has loaded, else one in Python's "
     "packages, else the dynamic loader's",
     kOwn, &Config::nccl_library},
    {"FARANDOLE_NVRTC_LIBRARY", "", "", "path of libnvrtc.so; empty: found like NCCL", kOwn,
     &Config::nvrtc_library},
    {"FARANDOLE_NVTX_LIBRARY", "", "", "path of libnvtx3interop.so.1; empty: found like NCCL", kOwn,
     &Config::nvtx_library},
    {"FARANDOLE_NVTX", "NVTX_INJECTION64_PATH", "",
     "not empty: shows the names of buckets and tensors on a profiler's timeline; profilers set "
     "NVTX_INJECTION64_PATH",
     kOwn, &Config::nvtx},
    {"FARANDOLE_SPIN_US", "", "-1",
     "microseconds that a waiting thread polls before it sleeps; -1: a call polls for 300 (100 if "
     "local ranks share cores), the background thread for 50 (0 below two cores per rank)",
     kOwn, &Config::spin_us, between(-1)},
    {"FARANDOLE_PRIORITY", "", "normal",
     "priority of the background thread: normal, or realtime (if the system permits it), so that "
     "computing threads do not delay it",
     kOwn, &Config::priority, one_of("normal, realtime")},
    {"FARANDOLE_DEATH_WATCH", "", "pidfd",
     "means by which a rank detects that another rank of its host has died: pidfd, or socket (the "
     "end of a connection; also used if pidfds are missing)",
     kOwn, &Config::death_watch, one_of("pidfd, socket")},
    {"FARANDOLE_STACK_SIGNAL", "", "-1",
     "signal on which a rank writes its main thread's stack for stall reports while native code "
     "holds Python's GIL; -1: the highest unhandled real-time signal; 0: none",
     kOwn, &Config::stack_signal, between(-1, 64)},
    {"FARANDOLE_LOG_LEVEL", "HOROVOD_LOG_LEVEL", "warning", "lowest level of messages to print",
     kOwn, &Config::log_level, one_of("trace, debug, info, warning, error, fatal")},
    {"FARANDOLE_LOG_FORMAT", "", "text", "text, or json: one object per line", kOwn,
     &Config::log_format, one_of("text, json")},
    {"FARANDOLE_LOG_RATE", "", "20",
     "most log lines per second, not counting errors; drops and counts the rest; 0: no limit", kOwn,
     &Config::log_rate},
    {"FARANDOLE_RENDEZVOUS", "", "",
     "unix:PATH of the rendezvous server at which ranks meet without MPI; none: one rank, alone",
     kOwn, &Config::rendezvous},
    {"FARANDOLE_JOB_SECRET", "", "",
     "the job's secret, at least 16 characters, for ranks on several hosts that meet by torch's "
     "store; empty: read from FARANDOLE_JOB_SECRET_FILE",
     kOwn, &Config::job_secret},
    {"FARANDOLE_JOB_SECRET_FILE", "", "",
     "file with the job's secret, owned by this user and with mode 600; empty: "
     "farandole/job-secret in the configuration directory, if it exists; none: no file",
     kOwn, &Config::job_secret_file},
    {"FARANDOLE_TRUST_NETWORK", "", "0",
     "1: ranks that meet by torch's store need no secret; only for networks of the job alone", kOwn,
     &Config::trust_network, between(0, 1)},
    {"FARANDOLE_RANK", "", "-1", "number of this rank, with FARANDOLE_RENDEZVOUS", kOwn,
     &Config::rank, between(-1)},
    {"FARANDOLE_SIZE", "", "-1", "number of ranks, with FARANDOLE_RENDEZVOUS", kOwn, &Config::size,
     between(-1)},
};

const char* from_environment(const Variable& variable) {
  if (const char* value = std::getenv(variable.name)) return value;
  return *variable.alias ? std::getenv(variable.alias) : nullptr;
}

[[noreturn]] void refuse(const Variable& variable, const std::string& text,
                         const std::string& wanted) {
  const bool by_alias = !std::getenv(variable.name) && from_environment(variable);
  throw Error(ErrorCode::kInvalidArgument, std::string(by_alias ? variable.alias : variable.name) +
                                               "='" + text + "' is " + wanted + " (" +
                                               variable.meaning + ")");
}

int64_t parse_integer(const Variable& variable, const std::string& text) {
  char* end = nullptr;
  int64_t value = std::strtoll(text.c_str(), &end, 10);
  std::string unit = end;
  if (end == text.c_str()) refuse(variable, text, "not a number");
  constexpr std::string_view kUnits[] = {"", "K", "M", "G"};
  for (size_t i = 0; i < std::size(kUnits); ++i) {
    if (unit != kUnits[i] && (i == 0 || unit != std::string(kUnits[i]) + "B")) continue;
    int64_t number = 0;
    if (__builtin_mul_overflow(value, int64_t{1} << (10 * i), &number) || value == INT64_MAX) break;
    const auto [least, most, choices] = variable.limits;
    if (number >= least && number <= most) return number;
    std::string range = "not a number from " + std::to_string(least);
    refuse(variable, text, range + (most == INT64_MAX ? " up" : " to " + std::to_string(most)));
  }
  refuse(variable, text, "not an integer below 2^63, optionally followed by K, M or G");
}

const std::string& parse_choice(const Variable& variable, const std::string& text) {
  if (*variable.limits.choices == '\0') return text;
  std::istringstream choices(variable.limits.choices);
  std::string choice;
  while (std::getline(choices >> std::ws, choice, ',')) {
    if (choice == text) return text;
  }
  refuse(variable, text, std::string("not one of ") + variable.limits.choices);
}

double parse_seconds(const Variable& variable, const std::string& text) {
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value >= 0)) {
    refuse(variable, text, "not a number of seconds, 0 or more");
  }
  return value;
}

// The settings file that `farandole tune` writes. Its lines have the form `NAME = VALUE`; `#` starts a comment.
struct TuningFile {
  std::string path;  // empty if there is none
  std::map<std::string, std::string> values;
};

// `path` is "none" to read no file, or "" to read the file at usual_path(), if it exists.
TuningFile read_tuning_file(const std::string& path) {
  if (path == "none") return {};
  TuningFile file{.path = path.empty() ? usual_path() : path, .values = {}};
  std::string why;
  const std::optional<std::string> text = read_own_file(file.path, why);
  if (!text) {
    if (!path.empty()) refuse(path, why.empty() ? "cannot be read" : why);
    // If HOME is /tmp, another user can put a file there. Such a file must not keep the job from starting.
    if (!why.empty())
      log(LogLevel::kWarning, "tuning file " + file.path + " is not used: it " + why);
    return {};
  }
  std::istringstream lines(*text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    size_t equals = line.find('=');
    if (equals == std::string::npos) {
      refuse(file.path, "line " + std::to_string(number) + " is not NAME = VALUE");
    }
    file.values[trimmed(line.substr(0, equals))] = trimmed(line.substr(equals + 1));
  }
  return file;
}

// Applies one line of the tuning file, unless the environment sets the variable.
void apply_tuned(Config& config, const std::string& path, const std::string& name,
                 const std::string& value) {
  auto known = [&](const Variable& v) { return v.job_wide && v.name == name; };
  const auto* variable = std::find_if(std::begin(kVariables), std::end(kVariables), known);
  if (variable == std::end(kVariables)) {
    throw Error(ErrorCode::kInvalidArgument,
                "tuning file " + path + ": " + name + " is not a job-wide setting of this version");
  }
  Source& source = config.sources[static_cast<size_t>(variable - kVariables)];
  if (source == Source::kEnvironment) return;
  try {
    variable->set(config, value);
  } catch (const Error& error) {
    throw Error(error.code(), "tuning file " + path + ": " + error.what());
  }
  source = Source::kTuning;
}

}  // namespace

void Variable::set(Config& config, const std::string& text) const {
  if (auto* integer = std::get_if<int64_t Config::*>(&field)) {
    config.*(*integer) = parse_integer(*this, text);
  } else if (auto* seconds = std::get_if<double Config::*>(&field)) {
    config.*(*seconds) = parse_seconds(*this, text);
  } else {
    config.*std::get<std::string Config::*>(field) = parse_choice(*this, text);
  }
}

std::string Variable::get(const Config& config) const {
  if (auto* integer = std::get_if<int64_t Config::*>(&field)) {
    return std::to_string(config.*(*integer));
  }
  if (auto* seconds = std::get_if<double Config::*>(&field)) {
    std::ostringstream text;
    text << config.*(*seconds);
    return text.str();
  }
  return config.*std::get<std::string Config::*>(field);
}

std::span<const Variable> variables() { return kVariables; }

const char* text_of(Source source) {
  const char* const texts[] = {"default", "tuning file", "environment", "rank 0"};
  return texts[static_cast<size_t>(source)];
}

Config read_config() {
  Config config{};
  for (const Variable& variable : kVariables) {
    const char* value = from_environment(variable);
    variable.set(config, value ? value : variable.fallback);
    config.sources.push_back(value ? Source::kEnvironment : Source::kDefault);
  }
  TuningFile file = read_tuning_file(config.tuning);
  config.tuning = file.path;
  for (const auto& [name, value] : file.values) apply_tuned(config, file.path, name, value);
  return config;
}

std::string job_wide_text(const Config& config) {
  std::string text;
  for (const Variable& variable : kVariables) {
    if (variable.job_wide) text += variable.get(config) + "\n";
  }
  return text;
}

void apply_job_wide_text(Config& config, const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  for (size_t row = 0; row < std::size(kVariables); ++row) {
    const Variable& variable = kVariables[row];
    if (!variable.job_wide || !std::getline(lines, line)) continue;
    if (variable.get(config) != line) config.sources[row] = Source::kRankZero;
    variable.set(config, line);
  }
}

}  // namespace farandole
