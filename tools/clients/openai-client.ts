import OpenAI from "openai";
import { ASKED, type Cases, first, LONG_ANSWER } from "./requests.js";

const { model, prompt, schema } = ASKED;
const messages = [{ role: "user" as const, content: prompt }];
const chat = { model, messages, temperature: 0, max_tokens: 8 };
const sampled = { ...chat, temperature: 0.9, seed: 7, n: 2 };
const counted = { stream_options: { include_usage: true } };
const tools = ["f", "g"].map((name) => ({
  type: "function" as const,
  function: { name, parameters: schema },
}));
const calling = { ...chat, tools, tool_choice: "required" as const, max_tokens: 24 };
const json_schema = { name: "a", schema, strict: true };
const structured = {
  ...chat,
  response_format: { type: "json_schema" as const, json_schema },
  max_tokens: 24,
};
const completion = {
  model,
  prompt: [prompt, ASKED.other],
  temperature: 0,
  max_tokens: 4,
  logprobs: 2,
};
const answer = { model, input: prompt, temperature: 0, max_output_tokens: 8 };
const functions = ["f", "g"].map((name) => ({
  type: "function" as const,
  name,
  parameters: schema,
  strict: true,
}));
const withImage = [
  {
    role: "user" as const,
    content: [{ type: "image_url" as const, image_url: { url: ASKED.image } }],
  },
];

/** `openai` of npm. */
export function openaiCases(url: string): Cases {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const { completions } = client.chat;
  const whole = (body: typeof chat & { logprobs?: boolean; top_logprobs?: number }) =>
    completions.stream({ ...body, ...counted }).finalChatCompletion();
  return {
    "a chat": () => completions.create(chat),
    "a chat, streamed": () => whole(chat),
    "log probabilities": () => completions.create({ ...chat, logprobs: true, top_logprobs: 2 }),
    "log probabilities, streamed": () => whole({ ...chat, logprobs: true, top_logprobs: 2 }),
    "n 2": () => completions.create(sampled),
    "n 2, streamed": () => whole(sampled),
    tools: () => completions.create(calling),
    "tools, streamed": () => whole(calling),
    "a named tool": () =>
      completions.create({
        ...calling,
        tool_choice: { type: "function", function: { name: "g" } },
      }),
    structured: () => completions.parse(structured),
    "structured, streamed": () => whole(structured),
    "two prompts with log probabilities": () => client.completions.create(completion),
    "echo, streamed": async () =>
      all(await client.completions.create({ ...completion, prompt, echo: true, stream: true })),
    "a response": () => client.responses.create(answer),
    "a response, streamed": () => client.responses.stream(answer).finalResponse(),
    "a response with tools": () =>
      client.responses.create({
        ...answer,
        tools: functions,
        tool_choice: "required",
        max_output_tokens: 24,
      }),
    models: async () => all(await client.models.list()),
    "an image: refused": () => completions.create({ ...chat, messages: withImage }),
    "an unknown model: refused": () => completions.create({ ...chat, model: "other" }),
    "a prompt that is too long: refused": () =>
      completions.create({ ...chat, messages: [{ role: "user", content: ASKED.long }] }),
    "more tokens than the model has: refused": () =>
      completions.create({ ...chat, max_tokens: 5000 }),
    "embeddings: refused": () => client.embeddings.create({ model, input: prompt }),
    "an image that is passed": () =>
      completions.create({ ...chat, model: "vision", messages: withImage }),
    "after an error": () => completions.create({ ...chat, model: "unstable" }),
    "left in the middle": async () =>
      first(await completions.create({ ...chat, max_tokens: LONG_ANSWER, stream: true })),
  };
}

async function all<T>(pieces: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const piece of pieces) list.push(piece);
  return list;
}
