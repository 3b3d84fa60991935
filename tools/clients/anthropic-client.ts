import Anthropic from "@anthropic-ai/sdk";
import { ASKED, type Cases, first, LONG_ANSWER } from "./requests.js";

const { model, prompt, schema } = ASKED;
const message = {
  model,
  messages: [{ role: "user" as const, content: prompt }],
  temperature: 0,
  max_tokens: 8,
};
const tools = ["f", "g"].map((name) => ({
  name,
  input_schema: { ...schema, type: "object" as const },
}));
const calling = { ...message, tools, tool_choice: { type: "any" as const }, max_tokens: 24 };
const withImage = [
  {
    role: "user" as const,
    content: [{ type: "image" as const, source: { type: "url" as const, url: ASKED.image } }],
  },
];

/** `@anthropic-ai/sdk`. */
export function anthropicCases(url: string): Cases {
  const { messages } = new Anthropic({ baseURL: url, apiKey: "none" });
  return {
    "a message": () => messages.create(message),
    "a message, streamed": () => messages.stream(message).finalMessage(),
    "a system prompt": () => messages.create({ ...message, system: ASKED.other }),
    tools: () => messages.create(calling),
    "tools, streamed": () => messages.stream(calling).finalMessage(),
    "a named tool": () => messages.create({ ...calling, tool_choice: { type: "tool", name: "g" } }),
    structured: () =>
      messages.create({
        ...message,
        max_tokens: 24,
        output_config: { format: { type: "json_schema", schema } },
      }),
    "a count of tokens": () => messages.countTokens({ model, messages: message.messages }),
    "an image: refused": () => messages.create({ ...message, messages: withImage }),
    "an unknown model: refused": () => messages.create({ ...message, model: "other" }),
    "a prompt that is too long: refused": () =>
      messages.create({ ...message, messages: [{ role: "user", content: ASKED.long }] }),
    "an image that is passed": () =>
      messages.create({ ...message, model: "vision", messages: withImage }),
    "after an error": () => messages.create({ ...message, model: "unstable" }),
    "left in the middle": async () =>
      first(await messages.create({ ...message, max_tokens: LONG_ANSWER, stream: true })),
  };
}
