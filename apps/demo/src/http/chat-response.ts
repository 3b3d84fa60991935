import type { EngineResult, EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import {
  type Generation,
  type ResponseFormat,
  transferMember,
  transferParamsOf,
  usageOf,
} from "./generation.js";
import type { ChatBody } from "./request-body.js";
import { StopText, stopsOf } from "./stop-text.js";

/** The prompt tokens of a conversation. The text parts of a message are joined. */
export function chatPrompt({ messages }: ChatBody, tokenizer: Tokenizer): number[] {
  const plain = messages.map((message) => {
    const { content } = message;
    return {
      ...message,
      content: typeof content === "string" ? content : content.map(({ text }) => text).join(""),
    };
  });
  return Array.from(tokenizer.encodeChat(plain));
}

/** The responses of `/v1/chat/completions`, in vLLM's format. */
export class ChatFormat implements ResponseFormat {
  readonly #tokenizer: Tokenizer;
  readonly #returnTokenIds: boolean;
  readonly #withLogprobs: boolean;
  readonly text: StopText;

  constructor(body: ChatBody, tokenizer: Tokenizer) {
    this.#tokenizer = tokenizer;
    this.#returnTokenIds = body.return_token_ids === true;
    this.#withLogprobs = body.logprobs === true;
    this.text = new StopText(tokenizer, stopsOf(body.stop));
  }

  whole(generation: Generation, result: EngineResult): object {
    const { stopped, shown } = this.text;
    const tokens = result.tokens.map(({ token }) => token);
    return {
      ...this.#head(generation, "chat.completion"),
      choices: [
        {
          index: 0,
          message: {
            role: "assistant",
            content: stopped === undefined ? this.#tokenizer.decode(tokens) : shown,
          },
          logprobs: this.#logprobsOf(result.tokens),
          finish_reason: result.finishReason,
          stop_reason: stopped ?? null,
          ...(this.#returnTokenIds ? { token_ids: tokens } : {}),
        },
      ],
      usage: usageOf(generation, tokens.length),
      ...(this.#returnTokenIds ? { prompt_token_ids: generation.promptTokens } : {}),
      kv_transfer_params: transferParamsOf(result),
    };
  }

  chunk(generation: Generation, token: EngineToken, text: string, isFirst: boolean): object {
    const choice = {
      index: 0,
      delta: isFirst ? { role: "assistant", content: text } : { content: text },
      logprobs: this.#logprobsOf([token]),
      finish_reason: null,
      ...(this.#returnTokenIds ? { token_ids: [token.token] } : {}),
    };
    const prompt = this.#returnTokenIds && isFirst ? { prompt_token_ids: generation.promptTokens } : {};
    return { ...this.#head(generation), choices: [choice], ...prompt };
  }

  finalChunk(generation: Generation, result: EngineResult): object {
    const choice = {
      index: 0,
      delta: { content: this.text.end() },
      logprobs: null,
      finish_reason: result.finishReason,
      stop_reason: this.text.stopped ?? null,
    };
    return { ...this.#head(generation), choices: [choice], ...transferMember(result) };
  }

  usageChunk(generation: Generation, result: EngineResult): object {
    return { ...this.#head(generation), choices: [], usage: usageOf(generation, result.tokens.length) };
  }

  #head({ id, model, createdSeconds }: Generation, object = "chat.completion.chunk") {
    return { id, object, created: createdSeconds, model };
  }

  #logprobsOf(tokens: readonly EngineToken[]): object | null {
    if (!this.#withLogprobs) return null;
    const entry = (token: number, logprob: number) => {
      const text = this.#tokenizer.decode([token], { skipSpecialTokens: false });
      return { token: text, logprob, bytes: [...Buffer.from(text)] };
    };
    return {
      content: tokens.map(({ token, logprob, top }) => ({
        ...entry(token, logprob),
        top_logprobs: top.map((each) => entry(each.token, each.logprob)),
      })),
    };
  }
}
