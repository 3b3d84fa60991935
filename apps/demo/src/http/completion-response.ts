import type { EngineResult, EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import {
  type Generation,
  type ResponseFormat,
  transferMember,
  transferParamsOf,
  usageOf,
} from "./generation.js";
import type { CompletionBody } from "./request-body.js";
import { StopText, stopsOf } from "./stop-text.js";

/** The responses of `/v1/completions`, in vLLM's format. */
export class CompletionFormat implements ResponseFormat {
  readonly #tokenizer: Tokenizer;
  readonly #returnTokenIds: boolean;
  readonly #withLogprobs: boolean;
  readonly text: StopText;

  constructor(body: CompletionBody, tokenizer: Tokenizer) {
    this.#tokenizer = tokenizer;
    this.#returnTokenIds = body.return_token_ids === true;
    this.#withLogprobs = body.logprobs != null;
    this.text = new StopText(tokenizer, stopsOf(body.stop));
  }

  whole(generation: Generation, result: EngineResult): object {
    const { stopped, shown } = this.text;
    const tokens = result.tokens.map(({ token }) => token);
    return {
      ...this.#head(generation),
      choices: [
        {
          index: 0,
          text: stopped === undefined ? this.#tokenizer.decode(tokens) : shown,
          logprobs: this.#logprobsOf(result.tokens),
          finish_reason: result.finishReason,
          stop_reason: stopped ?? null,
          ...(this.#returnTokenIds ? { token_ids: tokens, prompt_token_ids: generation.promptTokens } : {}),
        },
      ],
      usage: usageOf(generation, tokens.length),
      kv_transfer_params: transferParamsOf(result),
    };
  }

  chunk(generation: Generation, token: EngineToken, text: string, isFirst: boolean): object {
    const choice = {
      index: 0,
      text,
      logprobs: this.#logprobsOf([token]),
      finish_reason: null,
      stop_reason: null,
      ...(this.#returnTokenIds ? { token_ids: [token.token] } : {}),
      ...(this.#returnTokenIds && isFirst ? { prompt_token_ids: generation.promptTokens } : {}),
    };
    return { ...this.#head(generation), choices: [choice] };
  }

  finalChunk(generation: Generation, result: EngineResult): object {
    const choice = {
      index: 0,
      text: this.text.end(),
      logprobs: null,
      finish_reason: result.finishReason,
      stop_reason: this.text.stopped ?? null,
    };
    return { ...this.#head(generation), choices: [choice], ...transferMember(result) };
  }

  usageChunk(generation: Generation, result: EngineResult): object {
    return { ...this.#head(generation), choices: [], usage: usageOf(generation, result.tokens.length) };
  }

  #head({ id, model, createdSeconds }: Generation) {
    return { id, object: "text_completion", created: createdSeconds, model };
  }

  #logprobsOf(tokens: readonly EngineToken[]): object | null {
    if (!this.#withLogprobs) return null;
    const word = (token: number) => this.#tokenizer.decode([token], { skipSpecialTokens: false });
    let offset = 0;
    const offsets = tokens.map(({ token }) => {
      const begin = offset;
      offset += word(token).length;
      return begin;
    });
    return {
      text_offset: offsets,
      token_logprobs: tokens.map(({ logprob }) => logprob),
      tokens: tokens.map(({ token }) => word(token)),
      top_logprobs: tokens.map(({ top }) =>
        Object.fromEntries(top.map((each) => [word(each.token), each.logprob])),
      ),
    };
  }
}
