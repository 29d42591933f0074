// Random identifiers and fingerprints of secrets and configs.
#ifndef BASE_IDS_H_
#define BASE_IDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace expertd {

// A random non-zero 64-bit number from the kernel: incarnations, request ids, tickets.
uint64_t RandomId();

// `size` random bytes from the kernel: bootstrap ids.
std::string RandomBytes(size_t size);

// 64-bit FNV-1a of `bytes`: stable across processes and versions; not for secrets by itself.
uint64_t Fingerprint(std::string_view bytes);

// First 64 bits of HMAC-SHA256: proves that a message comes from one who knows `key`.
uint64_t KeyedDigest(std::string_view key, std::string_view message);

// Sixteen hex digits of a 64-bit value, for logs.
std::string Hex(uint64_t value);

}  // namespace expertd

#endif  // BASE_IDS_H_
