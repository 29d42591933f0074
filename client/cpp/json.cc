// JSON text.
#include "client/cpp/json.h"

#include <charconv>
#include <cmath>
#include <memory>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/util/json_util.h"
#include "google/protobuf/util/type_resolver.h"
#include "google/protobuf/util/type_resolver_util.h"

namespace expertd::client {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com";

std::string DeterministicBytes(const google::protobuf::Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&coded);
  coded.Trim();
  return bytes;
}

}  // namespace

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += absl::StrFormat("\\u%04x", c);
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

std::string JsonNumber(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end.ptr);
}

JsonObject& JsonObject::AddRaw(std::string_view key, std::string_view json) {
  StrAppend(&members_, members_.empty() ? "" : ",", JsonString(key), ":", json);
  return *this;
}

std::string JsonArray(const std::vector<std::string>& items) {
  return StrCat("[", absl::StrJoin(items, ","), "]");
}

std::string JsonArray(const std::vector<int64_t>& numbers) {
  return StrCat("[", absl::StrJoin(numbers, ","), "]");
}

std::string ToJson(const google::protobuf::Message& message) {
  using google::protobuf::util::NewTypeResolverForDescriptorPool;
  const std::unique_ptr<google::protobuf::util::TypeResolver> resolver(
      NewTypeResolverForDescriptorPool(kTypePrefix, message.GetDescriptor()->file()->pool()));
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::BinaryToJsonString(
      resolver.get(), StrCat(kTypePrefix, "/", message.GetDescriptor()->full_name()),
      DeterministicBytes(message), &json, options);
  return status.ok() ? json : "null";
}

}  // namespace expertd::client
