import type { EngineToken } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { CompletionBody } from "./request-body.js";
import { ResponseFormat } from "./response-format.js";

/** The responses of `/v1/completions`. */
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
