// Writes JSON text in the order it is told, and protobuf messages with a stable order.
//
//   JsonObject row;
//   row.Add("op", "forward").Add("median_us", 12.5).AddRaw("group", ToJson(info));
//   row.Text()  // {"op":"forward","median_us":12.5,"group":{...}}
#ifndef CLIENT_CPP_JSON_H_
#define CLIENT_CPP_JSON_H_

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/strings.h"
#include "google/protobuf/message.h"

namespace expertd::client {

// With quotes, escaped.
std::string JsonString(std::string_view text);
// Shortest text that reads back as the same double; null when it is not finite.
std::string JsonNumber(double value);

class JsonObject {
 public:
  // `json` is JSON text already.
  JsonObject& AddRaw(std::string_view key, std::string_view json);
  JsonObject& Add(std::string_view key, std::string_view value) {
    return AddRaw(key, JsonString(value));
  }
  JsonObject& Add(std::string_view key, const char* value) {
    return Add(key, std::string_view(value));
  }
  JsonObject& Add(std::string_view key, absl::string_view value) {
    return Add(key, StdView(value));
  }
  JsonObject& Add(std::string_view key, const std::string& value) {
    return Add(key, std::string_view(value));
  }
  JsonObject& Add(std::string_view key, double value) { return AddRaw(key, JsonNumber(value)); }
  JsonObject& Add(std::string_view key, bool value) {
    return AddRaw(key, value ? "true" : "false");
  }
  template <std::integral Integer>
  JsonObject& Add(std::string_view key, Integer value) {
    return AddRaw(key, std::to_string(value));
  }

  std::string Text() const { return "{" + members_ + "}"; }

 private:
  std::string members_;
};

// "[a,b,c]" of JSON texts.
std::string JsonArray(const std::vector<std::string>& items);
std::string JsonArray(const std::vector<int64_t>& numbers);

// Protobuf's JSON form on one line: field names as in the .proto, defaults shown, map keys sorted;
// 64-bit integers are strings, as that form wants.
std::string ToJson(const google::protobuf::Message& message);

}  // namespace expertd::client

#endif  // CLIENT_CPP_JSON_H_
