# SPDX-License-Identifier: Apache-2.0
"""Adam and bfloat16 on a small transformer: two ranks learn as one does on the joined batch."""

import pytest

import farandole.torch as hvd

pytestmark = pytest.mark.ranks(2)
STEPS, ROWS, LENGTH, WORDS, WIDTH = 60, 16, 32, 64, 64
TOLERANCE = 0.02  # of the loss: gradients in bfloat16 arithmetic are rounded by other batches


def network(torch):
    """A causal language model; the same weights on every call."""
    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(WORDS, WIDTH)
            self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = torch.nn.Linear(WIDTH, WORDS)

        def forward(self, x):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.layers(self.words(x), mask, is_causal=True))

    return Model().cuda()


def batch(torch, rank, step):
    """Texts in which each word follows from the one before: something can be learnt."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(WORDS, (ROWS, 1), generator=generator)
    for _ in range(LENGTH):
        words = torch.cat([words, (5 * words[:, -1:] + 3) % WORDS], 1)
    return words.cuda()


def step_loss(torch, net, words):
    with torch.autocast("cuda", torch.bfloat16):
        scores = net(words[:, :-1])
    return torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), words[:, 1:].flatten())


def curve(torch, net, opt, data):
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        loss = step_loss(torch, net, data(step))
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("views", [False, True])
def test_same_loss_curve_as_one_rank(views):
    import torch

    alone = network(torch)
    joined = curve(
        torch,
        alone,
        torch.optim.Adam(alone.parameters(), lr=1e-3),
        lambda step: torch.cat([batch(torch, rank, step) for rank in range(hvd.size())]),
    )
    shared = network(torch)
    opt = hvd.DistributedOptimizer(
        torch.optim.Adam(shared.parameters(), lr=1e-3),
        named_parameters=shared.named_parameters(),
        gradient_as_bucket_view=views,
    )
    hvd.broadcast_parameters(shared.state_dict(), root_rank=0)
    own = curve(torch, shared, opt, lambda step: batch(torch, hvd.rank(), step))
    mean = hvd.allreduce(own, name="losses")
    assert torch.all((mean - joined).abs() < TOLERANCE * (joined + 0.1)), (mean, joined)
    assert joined[-1] < 0.7 * joined[0]  # it has learnt
    for parameter in shared.parameters():  # and all ranks the same
        low = hvd.allreduce(parameter.detach(), op=hvd.Min)
        assert torch.equal(low, parameter)
