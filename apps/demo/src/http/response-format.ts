import type { EngineResult, EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import { type Generation, transferMember, transferParamsOf, usageOf } from "./generation.js";
import type { ChatBody, CompletionBody } from "./request-body.js";
import { StopText, stopsOf } from "./stop-text.js";

/** How the responses of an endpoint differ from those of others. */
export interface ResponseShape {
  readonly objects: { readonly whole: string; readonly chunk: string };
  /** Whether a choice has the prompt's token ids; else the response has them beside its choices. */
  readonly hasPromptInChoice: boolean;
  contentOf(text: string, place: "whole" | "first" | "next"): object;
  readonly logprobsOf: ((tokens: readonly EngineToken[]) => object) | undefined;
}

export class ResponseFormat {
  readonly text: StopText;
  readonly #tokenizer: Tokenizer;
  readonly #shape: ResponseShape;
  readonly #returnTokenIds: boolean;

  constructor(body: ChatBody | CompletionBody, tokenizer: Tokenizer, shape: ResponseShape) {
    this.text = new StopText(tokenizer, stopsOf(body.stop));
    this.#tokenizer = tokenizer;
    this.#shape = shape;
    this.#returnTokenIds = body.return_token_ids === true;
  }

  whole(generation: Generation, result: EngineResult): object {
    const { stopped, shown } = this.text;
    const tokens = result.tokens.map(({ token }) => token);
    const text = stopped === undefined ? this.#tokenizer.decode(tokens) : shown;
    return {
      ...this.#response(generation, "whole", {
        ...this.#shape.contentOf(text, "whole"),
        logprobs: this.#shape.logprobsOf?.(result.tokens) ?? null,
        finish_reason: result.finishReason,
        stop_reason: stopped ?? null,
        ...(this.#returnTokenIds ? { token_ids: tokens } : {}),
      }),
      usage: usageOf(generation, tokens.length),
      kv_transfer_params: transferParamsOf(result),
    };
  }

  chunk(generation: Generation, token: EngineToken, text: string, isFirst: boolean): object {
    const place = isFirst ? "first" : "next";
    return this.#response(generation, place, {
      ...this.#shape.contentOf(text, place),
      logprobs: this.#shape.logprobsOf?.([token]) ?? null,
      finish_reason: null,
      ...(this.#returnTokenIds ? { token_ids: [token.token] } : {}),
    });
  }

  finalChunk(generation: Generation, result: EngineResult): object {
    const choice = {
      ...this.#shape.contentOf(this.text.end(), "next"),
      logprobs: null,
      finish_reason: result.finishReason,
      stop_reason: this.text.stopped ?? null,
    };
    return { ...this.#response(generation, "next", choice), ...transferMember(result) };
  }

  usageChunk(generation: Generation, result: EngineResult): object {
    const usage = usageOf(generation, result.tokens.length);
    return { ...this.#response(generation, "next"), choices: [], usage };
  }

  #response(
    generation: Generation,
    place: "whole" | "first" | "next",
    choice: object = {},
  ): object {
    const { id, model, createdSeconds: created, promptTokens } = generation;
    const hasPrompt = this.#returnTokenIds && place !== "next";
    const prompt = hasPrompt ? { prompt_token_ids: promptTokens } : {};
    const [inChoice, beside] = this.#shape.hasPromptInChoice ? [prompt, {}] : [{}, prompt];
    const object = this.#shape.objects[place === "whole" ? "whole" : "chunk"];
    return {
      id,
      object,
      created,
      model,
      choices: [{ index: 0, ...choice, ...inChoice }],
      ...beside,
    };
  }
}

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

export function chatFormat(body: ChatBody, tokenizer: Tokenizer): ResponseFormat {
  const entry = (token: number, logprob: number) => {
    const text = tokenizer.decode([token], { skipSpecialTokens: false });
    return { token: text, logprob, bytes: [...Buffer.from(text)] };
  };
  const logprobsOf = (tokens: readonly EngineToken[]) => ({
    content: tokens.map(({ token, logprob, top }) => ({
      ...entry(token, logprob),
      top_logprobs: top.map((each) => entry(each.token, each.logprob)),
    })),
  });
  return new ResponseFormat(body, tokenizer, {
    objects: { whole: "chat.completion", chunk: "chat.completion.chunk" },
    hasPromptInChoice: false,
    contentOf: (content, place) =>
      place === "next"
        ? { delta: { content } }
        : { [place === "whole" ? "message" : "delta"]: { role: "assistant", content } },
    logprobsOf: body.logprobs === true ? logprobsOf : undefined,
  });
}

export function completionFormat(body: CompletionBody, tokenizer: Tokenizer): ResponseFormat {
  const word = (token: number) => tokenizer.decode([token], { skipSpecialTokens: false });
  const logprobsOf = (tokens: readonly EngineToken[]) => {
    const words = tokens.map(({ token }) => word(token));
    let length = 0;
    return {
      text_offset: words.map((text) => {
        length += text.length;
        return length - text.length;
      }),
      token_logprobs: tokens.map(({ logprob }) => logprob),
      tokens: words,
      top_logprobs: tokens.map(({ top }) =>
        Object.fromEntries(top.map((each) => [word(each.token), each.logprob])),
      ),
    };
  };
  return new ResponseFormat(body, tokenizer, {
    objects: { whole: "text_completion", chunk: "text_completion" },
    hasPromptInChoice: true,
    // Each chunk has the reason, unlike those of a chat.
    contentOf: (text) => ({ text, stop_reason: null }),
    logprobsOf: body.logprobs == null ? undefined : logprobsOf,
  });
}
