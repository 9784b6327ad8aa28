// SPDX-License-Identifier: Apache-2.0
// The version and the hash of this build; used by the bootstrap (peer_info) and the C ABI.
#pragma once

namespace farandole {

// Hash of the sources of this library, 16 hexadecimal digits. init() fails unless all ranks have the same.
const char* build_id();
const char* version();

}  // namespace farandole
