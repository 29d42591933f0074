# The public API has only grown since its committed descriptor set, and the check sees breaks.
import copy

import pytest
from api_check import breaking_changes, compile_api, methods, read_committed, undocumented_methods


@pytest.fixture(scope="module")
def current():
    return compile_api()


def find(files, message):
    for file in files.file:
        for candidate in file.message_type:
            if candidate.name == message:
                return candidate
    raise KeyError(message)


def test_only_additions_since_the_committed_descriptor_set(current):
    assert breaking_changes(read_committed(), current) == []


def test_the_committed_descriptor_set_is_up_to_date(current):
    # `./dev api` records additions; without it they would not be protected.
    assert breaking_changes(current, read_committed()) == []


def test_every_method_documents_its_errors(current):
    assert undocumented_methods(current) == []
    assert len(methods(current)) > 30


def change_removed_field(files):
    del find(files, "StepHeader").field[0]


def change_number(files):
    find(files, "StepHeader").field[1].number = 77


def change_type(files):
    find(files, "Tensor").field[1].type = 5


def change_oneof(files):
    find(files, "Tensor").field[2].ClearField("oneof_index")


def change_enum(files):
    for file in files.file:
        for enum in file.enum_type:
            if enum.name == "DType":
                enum.value[1].number = 42


def change_method(files):
    for file in files.file:
        for service in file.service:
            if service.name == "StepService":
                service.method[0].server_streaming = True


def change_removed_message(files):
    for file in files.file:
        kept = [m for m in file.message_type if m.name != "LayerInfo"]
        del file.message_type[:]
        file.message_type.extend(kept)


@pytest.mark.parametrize(
    "change",
    [
        change_removed_field,
        change_number,
        change_type,
        change_oneof,
        change_enum,
        change_method,
        change_removed_message,
    ],
)
def test_a_breaking_change_is_found(current, change):
    changed = copy.deepcopy(current)
    change(changed)
    assert breaking_changes(current, changed) != []


def test_an_added_field_is_no_break(current):
    changed = copy.deepcopy(current)
    field = find(changed, "StepHeader").field.add()
    field.name, field.number, field.type, field.label = "note", 99, 9, 1
    assert breaking_changes(current, changed) == []
