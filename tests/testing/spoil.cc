// The walk over a message's fields, and what is put into each kind of field.
#include "tests/testing/spoil.h"

#include <cstdlib>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/strings.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/util/message_differencer.h"

namespace expertd::testing {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Finds, in a copy of the root, the message that is being changed.
using Locate = std::function<Message*(Message* root)>;

class Walk {
 public:
  explicit Walk(const Message& root) : root_(root) {}

  void Visit(const Message& message, const std::string& path, const Locate& locate) {
    const auto* descriptor = message.GetDescriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const FieldDescriptor* field = descriptor->field(i);
      const std::string name = path + field->name();
      if (field->is_repeated()) {
        VisitRepeated(message, field, name, locate);
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        VisitMessage(message, field, name, locate);
      } else {
        VisitScalar(message, field, name, locate);
      }
    }
  }

  std::vector<Spoilt> Take() { return std::move(spoilt_); }

 private:
  void Add(std::string label, const Locate& locate, const std::function<void(Message*)>& change) {
    std::unique_ptr<Message> copy(root_.New());
    copy->CopyFrom(root_);
    change(locate(copy.get()));
    if (google::protobuf::util::MessageDifferencer::Equals(*copy, root_)) return;
    spoilt_.push_back({std::move(label), std::move(copy)});
  }

  void VisitMessage(const Message& message, const FieldDescriptor* field, const std::string& name,
                    const Locate& locate) {
    const Reflection* reflection = message.GetReflection();
    if (!reflection->HasField(message, field)) {
      Add(name + "=empty", locate,
          [=](Message* m) { m->GetReflection()->MutableMessage(m, field); });
      return;
    }
    Add(name + "=absent", locate, [=](Message* m) { m->GetReflection()->ClearField(m, field); });
    Visit(reflection->GetMessage(message, field), name + ".", [=](Message* root) {
      Message* parent = locate(root);
      return parent->GetReflection()->MutableMessage(parent, field);
    });
  }

  template <typename T>
  void Numbers([[maybe_unused]] T value, const std::function<void(const char*, T)>& add) {
    if constexpr (std::is_floating_point_v<T>) {
      add("=nan", std::numeric_limits<T>::quiet_NaN());
      add("=inf", std::numeric_limits<T>::infinity());
      add("=-1", T{-1});
    } else {
      add("=0", T{0});
      add("=next", static_cast<T>(value + 1));
      if constexpr (std::is_signed_v<T>) {
        add("=-1", T{-1});
        add("=min", std::numeric_limits<T>::min());
      }
      add("=max", std::numeric_limits<T>::max());
    }
  }

  void VisitScalar(const Message& message, const FieldDescriptor* field, const std::string& name,
                   const Locate& locate) {
    const Reflection* reflection = message.GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_BOOL: {
        const bool other = !reflection->GetBool(message, field);
        return Add(name + "=other", locate,
                   [=](Message* m) { m->GetReflection()->SetBool(m, field, other); });
      }
      case FieldDescriptor::CPPTYPE_ENUM:
        for (const int number : {0, 1, 2, 3, 4, 6, 99}) {
          Add(StrCat(name, "=", number), locate,
              [=](Message* m) { m->GetReflection()->SetEnumValue(m, field, number); });
        }
        return;
      case FieldDescriptor::CPPTYPE_INT64:
        return Numbers<int64_t>(
            reflection->GetInt64(message, field), [&](const char* what, int64_t value) {
              Add(name + what, locate,
                  [=](Message* m) { m->GetReflection()->SetInt64(m, field, value); });
            });
      case FieldDescriptor::CPPTYPE_UINT64:
        return Numbers<uint64_t>(
            reflection->GetUInt64(message, field), [&](const char* what, uint64_t value) {
              Add(name + what, locate,
                  [=](Message* m) { m->GetReflection()->SetUInt64(m, field, value); });
            });
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return Numbers<double>(
            reflection->GetDouble(message, field), [&](const char* what, double value) {
              Add(name + what, locate,
                  [=](Message* m) { m->GetReflection()->SetDouble(m, field, value); });
            });
      case FieldDescriptor::CPPTYPE_STRING:
        return VisitText(message, field, name, locate);
      default:
        Add(name + "=unknown kind of field", locate, [=](Message*) { std::abort(); });
    }
  }

  void VisitText(const Message& message, const FieldDescriptor* field, const std::string& name,
                 const Locate& locate) {
    const std::string value = message.GetReflection()->GetString(message, field);
    const auto add = [&](const char* what, const std::string& text) {
      Add(name + what, locate, [=](Message* m) { m->GetReflection()->SetString(m, field, text); });
    };
    add("=empty", "");
    add("=longer", value + "x");
    if (field->type() == FieldDescriptor::TYPE_BYTES) {
      if (!value.empty()) add("=shorter", value.substr(1));
      return;
    }
    add("=control", "a\nb\x01");
    add("=long", std::string(5000, 'x'));
  }

  void VisitRepeated(const Message& message, const FieldDescriptor* field, const std::string& name,
                     const Locate& locate) {
    const Reflection* reflection = message.GetReflection();
    const int size = reflection->FieldSize(message, field);
    const bool messages = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    Add(name + "=empty", locate, [=](Message* m) { m->GetReflection()->ClearField(m, field); });
    if (size > 0) {
      Add(name + "=shorter", locate, [=](Message* m) { m->GetReflection()->RemoveLast(m, field); });
    }
    Add(name + "=longer", locate, [=](Message* m) {
      const Reflection* r = m->GetReflection();
      if (messages) {
        Message* added = r->AddMessage(m, field);
        if (size > 0) added->CopyFrom(r->GetRepeatedMessage(*m, field, 0));
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
        r->AddString(m, field, "x");
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64) {
        r->AddUInt64(m, field, 12345);
      } else {
        r->AddInt64(m, field, 1);
      }
    });
    if (messages && size > 0) {
      Visit(reflection->GetRepeatedMessage(message, field, 0), name + "[0].", [=](Message* root) {
        Message* parent = locate(root);
        return parent->GetReflection()->MutableRepeatedMessage(parent, field, 0);
      });
    }
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_INT64) return;
    for (int i = 0; i < size; ++i) {
      Numbers<int64_t>(
          reflection->GetRepeatedInt64(message, field, i), [&](const char* what, int64_t value) {
            Add(StrCat(name, "[", i, "]", what), locate,
                [=](Message* m) { m->GetReflection()->SetRepeatedInt64(m, field, i, value); });
          });
    }
  }

  const Message& root_;
  std::vector<Spoilt> spoilt_;
};

}  // namespace

std::vector<Spoilt> SpoilEveryField(const Message& valid) {
  Walk walk(valid);
  walk.Visit(valid, "", [](Message* root) { return root; });
  return walk.Take();
}

}  // namespace expertd::testing
