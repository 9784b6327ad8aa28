// SPDX-License-Identifier: Apache-2.0
// The version of the library and a hash of its sources, for the bootstrap (peer_info.h) and the C ABI.
#pragma once

namespace farandole {

// Returns 16 hexadecimal digits. init() fails unless the hash is the same on all ranks.
const char* build_id();
const char* version();

}  // namespace farandole
