import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Template } from "@huggingface/jinja";
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { exists, readJson } from "../weights/checkpoint.js";

export interface Tokenizer {
  /** With the special tokens that the model's tokenizer adds (such as a leading `bos`). */
  encode(text: string): Int32Array;
  /** Without special tokens (such as `eos`) unless `skipSpecialTokens` is false. */
  decode(tokens: readonly number[], options?: { skipSpecialTokens?: boolean }): string;
  /**
   * The prompt of a conversation, ending where the assistant's answer begins.
   * @throws `KV_REQUEST_INVALID` when the model has no chat template or it refuses the messages.
   */
  encodeChat(messages: readonly ChatMessage[]): Int32Array;
}

export interface ChatMessage {
  readonly role: string;
  readonly content: string;
  readonly [field: string]: unknown;
}

const specialToken = z
  .union([z.string(), z.looseObject({ content: z.string() }).transform(({ content }) => content)])
  .nullish();
const configSchema = z.looseObject({
  tokenizer_class: z.string().nullish(),
  chat_template: z
    .union([z.string(), z.array(z.looseObject({ name: z.string(), template: z.string() }))])
    .nullish(),
  bos_token: specialToken,
  eos_token: specialToken,
  pad_token: specialToken,
  unk_token: specialToken,
});
type TokenizerConfig = z.infer<typeof configSchema>;

const wordLevelSchema = z.looseObject({
  pre_tokenizer: z.looseObject({ type: z.literal("WhitespaceSplit") }),
  model: z.looseObject({
    type: z.literal("WordLevel"),
    vocab: z.record(z.string(), z.number().int().nonnegative()),
    unk_token: z.string(),
  }),
});

/**
 * That of tokenizer.json; for the built-in model, words `t0`, `t1`, … separated by white space, and
 * a token by hash for every other word. A WordLevel tokenizer looks up whole words: Hugging Face
 * first cuts special tokens out of the text, so that with `t1` the word `t12` becomes two.
 * @throws `KV_CONFIG_INVALID` naming the file, `KV_MODEL_UNSUPPORTED` when the directory has no
 * tokenizer.
 */
export async function loadTokenizer(directory: string, vocabSize: number): Promise<Tokenizer> {
  const configPath = join(directory, "tokenizer_config.json");
  const config = (await exists(configPath)) ? await readJson(configPath, configSchema) : {};
  const chat = new ChatTemplate(await templateSource(directory, config), config);
  if (config.tokenizer_class === "NumberedWordTokenizer") {
    const vocabulary = Array.from(
      { length: vocabSize },
      (_, token) => [`t${token}`, token] as const,
    );
    return wordTokenizer(chat, new Map(vocabulary), (word) => hashedWord(word, vocabSize));
  }

  const path = join(directory, "tokenizer.json");
  if (!(await exists(path))) {
    throw new KvError("KV_MODEL_UNSUPPORTED", `${directory} has no tokenizer.json`, {
      hint: "save the fast tokenizer of the model there (AutoTokenizer.from_pretrained(…).save_pretrained(DIR))",
    });
  }
  const json = await readJson(path, z.unknown());
  const wordLevel = wordLevelSchema.safeParse(json);
  if (wordLevel.success) {
    const { vocab, unk_token } = wordLevel.data.model;
    return wordTokenizer(chat, new Map(Object.entries(vocab)), () => vocab[unk_token] ?? 0);
  }
  return huggingFace(path, json, config, chat);
}

function huggingFace(
  path: string,
  json: unknown,
  config: TokenizerConfig,
  chat: ChatTemplate,
): Tokenizer {
  let tokenizer: HuggingFaceTokenizer;
  try {
    tokenizer = new HuggingFaceTokenizer(json as object, config);
  } catch (error) {
    throw KvError.from(error, "KV_MODEL_UNSUPPORTED", `cannot use the tokenizer of ${path}`);
  }
  const encode = (text: string, addSpecialTokens: boolean) =>
    Int32Array.from(tokenizer.encode(text, { add_special_tokens: addSpecialTokens }).ids);
  return {
    encode: (text) => encode(text, true),
    decode: (tokens, { skipSpecialTokens = true } = {}) =>
      tokens.length === 0
        ? ""
        : tokenizer.decode([...tokens], { skip_special_tokens: skipSpecialTokens }),
    // A chat template writes the special tokens itself.
    encodeChat: (messages) => encode(chat.render(messages), false),
  };
}

function wordTokenizer(
  chat: ChatTemplate,
  vocabulary: ReadonlyMap<string, number>,
  tokenOfUnknown: (word: string) => number,
): Tokenizer {
  const special = new Set(Object.values(chat.specialTokens));
  const words = new Map([...vocabulary].map(([word, token]) => [token, word]));
  const encode = (text: string) =>
    Int32Array.from(
      text.split(/\s+/u).filter(Boolean),
      (word) => vocabulary.get(word) ?? tokenOfUnknown(word),
    );
  return {
    encode,
    decode: (tokens, { skipSpecialTokens = true } = {}) =>
      tokens
        .map((token) => words.get(token) ?? chat.specialTokens.unk_token)
        .filter((word) => !skipSpecialTokens || !special.has(word))
        .join(" "),
    encodeChat: (messages) => encode(chat.render(messages)),
  };
}

/** Padding, begin, end, and the turns of the built-in model's chat template. */
const RESERVED_TOKENS = 6;

/** FNV-1a, so that different texts are different prompts. */
function hashedWord(word: string, vocabSize: number): number {
  let hash = 0x811c9dc5;
  for (const byte of Buffer.from(word)) hash = Math.imul(hash ^ byte, 0x01000193);
  return RESERVED_TOKENS + ((hash >>> 0) % (vocabSize - RESERVED_TOKENS));
}

async function templateSource(
  directory: string,
  { chat_template: template }: TokenizerConfig,
): Promise<string | undefined> {
  const path = join(directory, "chat_template.jinja");
  if (await exists(path)) return readFile(path, "utf8");
  if (!Array.isArray(template)) return template ?? undefined;
  return template.find(({ name }) => name === "default")?.template;
}

/**
 * As Hugging Face's `apply_chat_template` with `add_generation_prompt`. The template is parsed on
 * first use: a broken one affects only chat requests.
 */
class ChatTemplate {
  readonly specialTokens;
  readonly #source: string | undefined;
  #template: Template | undefined;

  constructor(source: string | undefined, config: TokenizerConfig) {
    this.#source = source;
    this.specialTokens = {
      bos_token: config.bos_token ?? "",
      eos_token: config.eos_token ?? "",
      pad_token: config.pad_token ?? "",
      unk_token: config.unk_token ?? "",
    };
  }

  render(messages: readonly ChatMessage[]): string {
    if (this.#source === undefined) {
      throw new KvError("KV_REQUEST_INVALID", "the model has no chat template", {
        hint: "use /v1/completions",
      });
    }
    const values = { ...this.specialTokens, messages, add_generation_prompt: true };
    try {
      this.#template ??= new Template(this.#source);
      return this.#template.render(values);
    } catch (error) {
      const what = "the model's chat template refused the messages";
      throw KvError.from(error, "KV_REQUEST_INVALID", what);
    }
  }
}
