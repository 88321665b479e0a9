"""Many tensors to a device and back, in one copy. ``meta`` stands for another device where only
locations matter; that numbers arrive is tested for every method on a simulated device
(``test_far_device.py``).
"""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from privssl.training import device_transfer

CPU, META = torch.device("cpu"), torch.device("meta")


def tensors() -> dict[str, Tensor]:
    """Tensors of two types, in several layouts; one without dimensions, one empty."""
    return {
        "kernel": torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "weight": torch.rand(5, 3).requires_grad_(),
        "turned": torch.rand(3, 5).t(),
        "steps": torch.tensor(3.0),
        "counted": torch.tensor([7, 8]),
        "none": torch.empty(0, 3),
    }


@pytest.mark.parametrize("there", [CPU, META])
def test_tensors_arrive_with_form_and_layout_and_without_a_graph(there: torch.device) -> None:
    sent = tensors()
    arrived = device_transfer.move_to(sent, there)
    assert list(arrived) == list(sent)
    for name, one in arrived.items():
        assert one.device == there and not one.requires_grad
        assert (one.shape, one.dtype) == (sent[name].shape, sent[name].dtype)
        if name != "turned":  # it is neither of the two layouts that networks have
            assert one.stride() == sent[name].stride()


def test_each_type_of_numbers_is_sent_in_one_copy() -> None:
    copies = []
    real = Tensor.to

    def counted(tensor: Tensor, *where: object, **how: object) -> Tensor:
        copies.append(tensor.dtype)
        return real(tensor, *where, **how)  # type: ignore[call-overload, no-any-return]

    sent = tensors()
    with patch.object(Tensor, "to", counted):
        device_transfer.move_to(sent, META)
    assert sorted(map(str, copies)) == ["torch.float32", "torch.int64"]


def test_tensors_moved_to_the_cpu_have_their_own_memory() -> None:
    # Pretend that some tensors on the CPU are on the other device.
    sent = tensors()
    with patch.object(
        device_transfer, "_group_by_kind", lambda given: {(None, META): list(given)[:4]}
    ):
        arrived = device_transfer.move_to(sent, CPU)
    for name in ("kernel", "weight", "turned", "steps"):
        assert torch.equal(arrived[name], sent[name])
        assert arrived[name].untyped_storage().nbytes() == 4 * sent[name].numel()


def test_tensors_already_on_the_device_keep_their_memory_and_copies_do_not() -> None:
    sent = tensors()
    for name, one in device_transfer.move_to(sent, CPU).items():
        assert one.data_ptr() == sent[name].data_ptr()
    for name, one in device_transfer.copy_tensors(sent).items():
        assert torch.equal(one, sent[name])
        assert one.numel() == 0 or one.data_ptr() != sent[name].data_ptr()


def test_put_fills_tensors_and_keeps_their_layout() -> None:
    into = {name: torch.zeros_like(one) for name, one in tensors().items()}
    values = {name: one.detach().contiguous() for name, one in tensors().items()}
    values["nobody asked for it"] = torch.ones(1)
    device_transfer.put(into, values)
    for name, one in into.items():
        assert torch.equal(one, values[name])
    assert into["kernel"].is_contiguous(memory_format=torch.channels_last)
    device_transfer.put({}, values)
    with pytest.raises(KeyError):
        device_transfer.put(into, {})
