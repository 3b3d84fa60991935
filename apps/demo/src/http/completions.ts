import type { EngineResult, EngineToken } from "../engine/request.js";
import { textStream } from "../model/tokenizer/text-stream.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { Generation } from "./generation.js";
import { transferParamsOf, usageOf } from "./generation.js";
import type { CompletionBody } from "./generation-body.js";

/** The forms of `/v1/completions`, as vLLM writes them. */
export function completionForms(body: CompletionBody, tokenizer: Tokenizer) {
  const returnTokenIds = body.return_token_ids === true;
  const withLogprobs = body.logprobs != null;
  const text = textStream(tokenizer);
  const word = (token: number) => tokenizer.decode([token], { skipSpecialTokens: false });
  const head = ({ id, model, createdSeconds }: Generation) => ({
    id,
    object: "text_completion",
    created: createdSeconds,
    model,
  });

  function logprobsOf(tokens: readonly EngineToken[], offset: number): object | null {
    if (!withLogprobs) return null;
    let at = offset;
    const offsets = tokens.map(({ token }) => {
      const begin = at;
      at += word(token).length;
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

  return {
    whole(generation: Generation, result: EngineResult): object {
      const tokens = result.tokens.map(({ token }) => token);
      return {
        ...head(generation),
        choices: [
          {
            index: 0,
            text: tokenizer.decode(tokens),
            logprobs: logprobsOf(result.tokens, 0),
            finish_reason: result.finishReason,
            stop_reason: null,
            ...(returnTokenIds ? { token_ids: tokens, prompt_token_ids: generation.promptTokens } : {}),
          },
        ],
        usage: usageOf(generation, tokens.length),
        kv_transfer_params: transferParamsOf(result),
      };
    },
    chunk(generation: Generation, token: EngineToken, first: boolean): object {
      return {
        ...head(generation),
        choices: [
          {
            index: 0,
            text: text.push(token.token),
            logprobs: logprobsOf([token], 0),
            finish_reason: null,
            stop_reason: null,
            ...(returnTokenIds ? { token_ids: [token.token] } : {}),
            ...(returnTokenIds && first ? { prompt_token_ids: generation.promptTokens } : {}),
          },
        ],
      };
    },
    closing(generation: Generation, result: EngineResult): object {
      const choice = {
        index: 0,
        text: text.end(),
        logprobs: null,
        finish_reason: result.finishReason,
        stop_reason: null,
      };
      return { ...head(generation), choices: [choice] };
    },
    usage: (generation: Generation, result: EngineResult): object => ({
      ...head(generation),
      choices: [],
      usage: usageOf(generation, result.tokens.length),
    }),
  };
}

export type AnswerForms = ReturnType<typeof completionForms>;
