// Joins text parts, also where Abseil's string_view is not std::string_view.
//
// Distributions build Abseil for an older language standard, and its string_view is then a type of
// its own; everything here takes and gives std::string_view.
#ifndef BASE_STRINGS_H_
#define BASE_STRINGS_H_

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace expertd {

inline std::string_view StdView(absl::string_view text) { return {text.data(), text.size()}; }
inline absl::string_view AbslView(std::string_view text) { return {text.data(), text.size()}; }

// A part as absl::StrCat takes it.
template <typename Part>
decltype(auto) AsAbslPart(const Part& part) {
  if constexpr (std::is_same_v<Part, std::string_view>) {
    return AbslView(part);
  } else {
    return (part);
  }
}

// The parts as one string: numbers in decimal, as absl::StrCat.
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  return absl::StrCat(AsAbslPart(parts)...);
}

template <typename... Parts>
void StrAppend(std::string* to, const Parts&... parts) {
  absl::StrAppend(to, AsAbslPart(parts)...);
}

}  // namespace expertd

#endif  // BASE_STRINGS_H_
