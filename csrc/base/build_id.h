// SPDX-License-Identifier: Apache-2.0
// Version and source hash of this build, for the bootstrap (peer_info) and the C ABI.
#pragma once

namespace farandole {

// Hash of this library's sources, 16 hexadecimal digits. init() fails unless it is equal on all ranks.
const char* build_id();
const char* version();

}  // namespace farandole
