import type { EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { ChatBody } from "./request-body.js";
import { ResponseFormat } from "./response-format.js";

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

/** The responses of `/v1/chat/completions`. */
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
