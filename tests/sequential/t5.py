"""An encoder and a decoder as people write them: with no regard to pipelines or to tracing."""

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class T5Config:
    """By default T5-small."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    num_buckets: int = 32
    max_distance: int = 128
    dropout_rate: float = 0.1
    pad_token_id: int = 0
    is_decoder: bool = False


@dataclass
class Seq2SeqOutput:
    """The output of a T5."""

    logits: Optional[Tensor] = None
    encoder_last_hidden_state: Optional[Tensor] = None
    loss: Optional[Tensor] = None


class T5LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, hidden):
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


class T5FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer_norm = T5LayerNorm(config.d_model)
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = F.relu

    def forward(self, hidden):
        forwarded = self.act(self.wi(self.layer_norm(hidden)))
        forwarded = self.wo(self.dropout(forwarded))
        return hidden + self.dropout(forwarded)


class T5Attention(nn.Module):
    def __init__(self, config, has_relative_attention_bias=False):
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.is_decoder = config.is_decoder
        self.has_relative_attention_bias = has_relative_attention_bias
        self.n_heads, self.d_kv, self.dropout = config.num_heads, config.d_kv, config.dropout_rate
        self.num_buckets, self.max_distance = config.num_buckets, config.max_distance
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(config.num_buckets, config.num_heads)

    def _bucket(self, distance):
        """Near positions have a bucket each; further ones share some, by their logarithm."""
        buckets, offset = self.num_buckets, 0
        if self.is_decoder:
            distance = -torch.min(distance, torch.zeros_like(distance))
        else:
            buckets //= 2
            offset = (distance > 0).to(torch.long) * buckets
            distance = torch.abs(distance)
        exact = buckets // 2
        further = torch.log(distance.clamp(min=1).float() / exact) / math.log(
            self.max_distance / exact
        )
        further = exact + (further * (buckets - exact)).to(torch.long)
        further = torch.min(further, torch.full_like(further, buckets - 1))
        return offset + torch.where(distance < exact, distance, further)

    def compute_bias(self, query_length, key_length, device):
        context = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        values = self.relative_attention_bias(self._bucket(memory - context))
        return values.permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden, mask=None, key_value_states=None, position_bias=None):
        batch_size, seq_length = hidden.shape[:2]

        def shape(states):
            return states.view(batch_size, -1, self.n_heads, self.d_kv).transpose(1, 2)

        source = hidden if key_value_states is None else key_value_states
        query, key, value = shape(self.q(hidden)), shape(self.k(source)), shape(self.v(source))
        scores = torch.matmul(query, key.transpose(3, 2))
        if position_bias is None:
            key_length = key.shape[2]
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(seq_length, key_length, scores.device)
            else:
                position_bias = torch.zeros(
                    (1, self.n_heads, seq_length, key_length),
                    device=scores.device,
                    dtype=scores.dtype,
                )
            if mask is not None:
                position_bias = position_bias + mask
        scores += position_bias
        weights = F.softmax(scores, dim=-1).type_as(scores)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        attended = torch.matmul(weights, value).transpose(1, 2).contiguous()
        attended = attended.view(batch_size, -1, self.n_heads * self.d_kv)
        return self.o(attended), position_bias


class T5Block(nn.Module):
    def __init__(self, config, has_relative_attention_bias):
        super().__init__()
        self.is_decoder = config.is_decoder
        self.self_norm = T5LayerNorm(config.d_model)
        self.self_attention = T5Attention(config, has_relative_attention_bias)
        if self.is_decoder:
            self.cross_norm = T5LayerNorm(config.d_model)
            self.cross_attention = T5Attention(config)
        self.ff = T5FeedForward(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        hidden,
        mask=None,
        position_bias=None,
        encoder_hidden=None,
        encoder_mask=None,
        encoder_position_bias=None,
    ):
        attended, position_bias = self.self_attention(
            self.self_norm(hidden), mask=mask, position_bias=position_bias
        )
        hidden = hidden + self.dropout(attended)
        outputs = (position_bias,)
        if self.is_decoder and encoder_hidden is not None:
            attended, encoder_position_bias = self.cross_attention(
                self.cross_norm(hidden),
                mask=encoder_mask,
                key_value_states=encoder_hidden,
                position_bias=encoder_position_bias,
            )
            hidden = hidden + self.dropout(attended)
            outputs = outputs + (encoder_position_bias,)
        return (self.ff(hidden),) + outputs


class T5Stack(nn.Module):
    def __init__(self, config, embed_tokens):
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        self.block = nn.ModuleList(
            [
                T5Block(config, has_relative_attention_bias=bool(i == 0))
                for i in range(config.num_layers)
            ]
        )
        self.final_layer_norm = T5LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def _extended_mask(self, mask, dtype):
        if mask.dim() == 3:
            extended = mask[:, None, :, :]
        elif mask.dim() == 2:
            extended = mask[:, None, None, :]
        else:
            raise ValueError(f'a mask of the wrong shape: {mask.shape}')
        extended = extended.to(dtype=dtype)
        return (1.0 - extended) * torch.finfo(dtype).min

    def forward(self, input_ids, attention_mask=None, encoder_hidden=None, encoder_mask=None):
        batch_size, seq_length = input_ids.size()
        hidden = self.dropout(self.embed_tokens(input_ids))
        if attention_mask is None:
            attention_mask = torch.ones(batch_size, seq_length, device=hidden.device)
        if self.config.is_decoder:
            ids = torch.arange(seq_length, device=hidden.device)
            causal = ids[None, None, :].repeat(batch_size, seq_length, 1) <= ids[None, :, None]
            attention_mask = causal.to(attention_mask.dtype) * attention_mask[:, None, :]
        mask = self._extended_mask(attention_mask, hidden.dtype)
        if encoder_mask is not None:
            encoder_mask = self._extended_mask(encoder_mask, hidden.dtype)
        position_bias = encoder_position_bias = None
        for layer in self.block:
            outputs = layer(
                hidden, mask, position_bias, encoder_hidden, encoder_mask, encoder_position_bias
            )
            hidden, position_bias = outputs[:2]
            if self.config.is_decoder and encoder_hidden is not None:
                encoder_position_bias = outputs[2]
        return self.dropout(self.final_layer_norm(hidden))


class T5(nn.Module):
    """T5 (arXiv 1910.10683): one embedding for the encoder, the decoder and the head."""

    def __init__(self, config, tie_word_embeddings=True):
        super().__init__()
        self.config = config
        self.model_dim = config.d_model
        self.tie_word_embeddings = tie_word_embeddings
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared)
        self.decoder = T5Stack(T5Config(**{**vars(config), 'is_decoder': True}), self.shared)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if tie_word_embeddings:
            self.lm_head.weight = self.shared.weight
        nn.init.normal_(self.shared.weight, std=1.0)

    def _shift_right(self, labels):
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted[..., 0] = self.config.pad_token_id
        shifted.masked_fill_(shifted == -100, self.config.pad_token_id)
        return shifted

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, labels=None):
        encoder_hidden = self.encoder(input_ids, attention_mask)
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self._shift_right(labels)
        sequence = self.decoder(
            decoder_input_ids, encoder_hidden=encoder_hidden, encoder_mask=attention_mask
        )
        if self.tie_word_embeddings:
            sequence = sequence * (self.model_dim**-0.5)
        return Seq2SeqOutput(
            logits=self.lm_head(sequence), encoder_last_hidden_state=encoder_hidden
        )
