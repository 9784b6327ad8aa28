// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli), by the CPU's instruction where it has one. Finds bits that memory or a network has changed.
// It has no key, so it does not stop somebody who changes bytes on purpose. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole::kernels {

uint32_t crc32c(const void* data, size_t bytes);

// The same without that instruction.
uint32_t crc32c_by_table(const void* data, size_t bytes);

}  // namespace farandole::kernels
