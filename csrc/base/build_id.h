// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace farandole {

// Hash of the sources this library was built from (16 hexadecimal digits): equal on all ranks or init refuses.
const char* build_id();
const char* version();

}  // namespace farandole
