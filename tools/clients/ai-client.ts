import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, type ToolSet } from "ai";
import { ASKED, type Cases, first, LONG_ANSWER } from "./requests.js";

const { model: name, prompt } = ASKED;
const asked = { prompt, temperature: 0, maxOutputTokens: 8 };
const schema = jsonSchema<{ a: string }>({ ...ASKED.schema, type: "object" });
const tools: ToolSet = { f: { inputSchema: schema }, g: { inputSchema: schema } };
const calling = { ...asked, prompt, tools, toolChoice: "required" as const, maxOutputTokens: 24 };
const structured = { ...asked, output: Output.object({ schema }), maxOutputTokens: 24 };
const image = [
  { role: "user" as const, content: [{ type: "image" as const, image: new URL(ASKED.image) }] },
];
/** The errors of a stream come with its parts. */
const onError = () => {};

/** `ai` of Vercel, with its provider of OpenAI's API. */
export function aiCases(url: string): Cases {
  const provider = createOpenAICompatible({
    name: "kv",
    baseURL: `${url}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
    // Else the client would fetch the image.
    supportedUrls: () => ({ "image/*": [/^http:/] }),
  });
  const model = provider(name);
  const made = async (result: ReturnType<typeof streamText>) => {
    // Each of them ends with the error of the stream.
    const [text, finishReason, usage, calls] = await Promise.all([
      result.text,
      result.finishReason,
      result.usage,
      result.toolCalls,
    ]);
    return {
      text,
      finishReason,
      usage,
      calls: calls.map(({ toolName, input }) => ({ toolName, input })),
    };
  };
  const generated = async (settings: Parameters<typeof generateText>[0]) => {
    const { text, finishReason, usage, toolCalls } = await generateText(settings);
    return {
      text,
      finishReason,
      usage,
      calls: toolCalls.map(({ toolName, input }) => ({ toolName, input })),
    };
  };
  return {
    "a text": () => generated({ model, ...asked }),
    "a text, streamed": () => made(streamText({ model, ...asked, onError })),
    tools: () => generated({ model, ...calling }),
    "tools, streamed": () => made(streamText({ model, ...calling, onError })),
    structured: async () => (await generateText({ model, ...structured })).output,
    "structured, streamed": async () => streamText({ model, ...structured, onError }).output,
    "an image: refused": () =>
      generated({ model, temperature: 0, maxOutputTokens: 8, messages: image }),
    "an unknown model: refused": () => generated({ ...asked, model: provider("other") }),
    "an unknown model, streamed: refused": () =>
      made(streamText({ ...asked, model: provider("other"), onError })),
    "an image that is passed": () =>
      generated({ model: provider("vision"), temperature: 0, maxOutputTokens: 8, messages: image }),
    "after an error": () => generated({ ...asked, model: provider("unstable") }),
    "left in the middle": async () => {
      const long = { ...asked, maxOutputTokens: LONG_ANSWER };
      const leaving = new AbortController();
      const abortSignal = leaving.signal;
      const { textStream } = streamText({ model, ...long, abortSignal, onError });
      const piece = await first(textStream);
      leaving.abort();
      return piece;
    },
  };
}
