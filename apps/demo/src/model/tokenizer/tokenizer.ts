import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Template } from "@huggingface/jinja";
import { Tokenizer as HuggingFaceTokenizer } from "@huggingface/tokenizers";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { exists, readJson } from "../weights/checkpoint.js";

export interface Tokenizer {
  /**
   * Encodes text, with the special tokens that the model's tokenizer adds (such as a leading
   * `bos`).
   */
  encode(text: string): Int32Array;
  /** Decodes tokens, without special tokens (such as `eos`) unless `skipSpecialTokens` is false. */
  decode(tokens: ArrayLike<number>, options?: { skipSpecialTokens?: boolean }): string;
  /**
   * The prompt of a conversation, ending where the assistant's answer begins.
   *
   * @throws KvError KV_REQUEST_INVALID when the model has no chat template or it refuses the
   * messages.
   */
  encodeChat(messages: readonly ChatMessage[]): Int32Array;
}

const specialToken = z.union([z.string(), z.looseObject({ content: z.string() })]).nullish();
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
 * The tokenizer of a model directory: that of tokenizer.json with the chat template of
 * tokenizer_config.json or chat_template.jinja; for the built-in model, words `t0`, `t1`, …
 * separated by white space, and a token by hash for every other word.
 *
 * A WordLevel tokenizer looks up whole words. (Hugging Face first cuts special tokens out of the
 * text: with a special token `t1` the word `t12` becomes two tokens. Send token ids where that
 * matters.)
 *
 * @throws KvError KV_CONFIG_INVALID naming the file, KV_MODEL_UNSUPPORTED when the directory has no
 * tokenizer.
 */
export async function loadTokenizer(options: {
  directory: string;
  vocabSize: number;
}): Promise<Tokenizer> {
  const { directory, vocabSize } = options;
  const configPath = join(directory, "tokenizer_config.json");
  const parsed = configSchema.safeParse(
    (await exists(configPath)) ? await readJson(configPath) : {},
  );
  if (!parsed.success)
    throw new KvError("KV_CONFIG_INVALID", `${configPath}: ${z.prettifyError(parsed.error)}`);
  const config = parsed.data;
  const renderChat = chatTemplate(await templateSource(directory, config), {
    bos_token: contentOf(config.bos_token) ?? "",
    eos_token: contentOf(config.eos_token) ?? "",
    pad_token: contentOf(config.pad_token) ?? "",
    unk_token: contentOf(config.unk_token) ?? "",
  });

  const special = [config.bos_token, config.eos_token, config.pad_token, config.unk_token].map(
    contentOf,
  );
  const words = (
    vocabulary: ReadonlyMap<string, number>,
    unknown: string,
    tokenOfUnknown?: (word: string) => number,
  ): Tokenizer => {
    const tokenizer = wordTokenizer({ vocabulary, unknown, tokenOfUnknown, special });
    return { ...tokenizer, encodeChat: (messages) => tokenizer.encode(renderChat(messages)) };
  };
  if (config.tokenizer_class === "NumberedWordTokenizer") {
    return words(numberedWords(vocabSize), "t0", (word) => hashedWord(word, vocabSize));
  }

  const path = join(directory, "tokenizer.json");
  if (!(await exists(path))) {
    throw new KvError("KV_MODEL_UNSUPPORTED", `${directory} has no tokenizer.json`, {
      hint: "save the fast tokenizer of the model there (AutoTokenizer.from_pretrained(…).save_pretrained(DIR))",
    });
  }
  const json = await readJson(path);
  const wordLevel = wordLevelSchema.safeParse(json);
  if (wordLevel.success) {
    const { vocab, unk_token } = wordLevel.data.model;
    return words(new Map(Object.entries(vocab)), unk_token);
  }
  return huggingFace(openHuggingFace(path, json, config), renderChat);
}

function openHuggingFace(
  path: string,
  json: unknown,
  config: TokenizerConfig,
): HuggingFaceTokenizer {
  try {
    return new HuggingFaceTokenizer(json as object, config);
  } catch (error) {
    throw KvError.from(error, "KV_MODEL_UNSUPPORTED", `cannot use the tokenizer of ${path}`);
  }
}

function huggingFace(
  tokenizer: HuggingFaceTokenizer,
  renderChat: (messages: readonly ChatMessage[]) => string,
): Tokenizer {
  const encode = (text: string, addSpecialTokens: boolean): Int32Array =>
    Int32Array.from(tokenizer.encode(text, { add_special_tokens: addSpecialTokens }).ids);
  return {
    encode: (text) => encode(text, true),
    decode: (tokens, { skipSpecialTokens = true } = {}) =>
      tokens.length === 0
        ? ""
        : tokenizer.decode(Array.from(tokens), { skip_special_tokens: skipSpecialTokens }),
    // A chat template writes the special tokens itself.
    encodeChat: (messages) => encode(renderChat(messages), false),
  };
}

async function templateSource(
  directory: string,
  config: TokenizerConfig,
): Promise<string | undefined> {
  const path = join(directory, "chat_template.jinja");
  if (await exists(path)) return await readFile(path, "utf8");
  const template = config.chat_template ?? undefined;
  if (template === undefined || typeof template === "string") return template;
  return template.find(({ name }) => name === "default")?.template;
}

function contentOf(token: z.infer<typeof specialToken>): string | undefined {
  return typeof token === "object" ? token?.content : token;
}

/**
 * Splits text at white space and looks up whole words; a word outside of the vocabulary is the
 * unknown token, or that of `tokenOfUnknown`.
 */
function wordTokenizer(options: {
  vocabulary: ReadonlyMap<string, number>;
  unknown: string;
  tokenOfUnknown: ((word: string) => number) | undefined;
  special: readonly (string | undefined)[];
}): Omit<Tokenizer, "encodeChat"> {
  const { vocabulary, unknown } = options;
  const special = new Set(options.special);
  const words = new Map([...vocabulary].map(([word, token]) => [token, word]));
  const unknownToken = vocabulary.get(unknown) ?? 0;
  const { tokenOfUnknown = () => unknownToken } = options;
  return {
    encode: (text) =>
      Int32Array.from(
        text.split(/\s+/u).filter(Boolean),
        (word) => vocabulary.get(word) ?? tokenOfUnknown(word),
      ),
    decode: (tokens, { skipSpecialTokens = true } = {}) =>
      Array.from(tokens, (token) => words.get(token) ?? unknown)
        .filter((word) => !skipSpecialTokens || !special.has(word))
        .join(" "),
  };
}

/** The vocabulary of the built-in model: token i is the word `t{i}`. */
function numberedWords(vocabSize: number): Map<string, number> {
  return new Map(Array.from({ length: vocabSize }, (_, token) => [`t${token}`, token]));
}

/**
 * Tokens of the built-in model that stand for themselves: padding, begin, end, and the turns of its
 * chat template.
 */
const RESERVED_TOKENS = 6;

/**
 * The token of an ordinary word in the built-in model: a hash (FNV-1a), so that different texts are
 * different prompts.
 */
function hashedWord(word: string, vocabSize: number): number {
  let hash = 0x811c9dc5;
  for (const byte of Buffer.from(word)) hash = Math.imul(hash ^ byte, 0x01000193);
  return RESERVED_TOKENS + ((hash >>> 0) % (vocabSize - RESERVED_TOKENS));
}

/** A message of `/v1/chat/completions`; other fields reach the template as they are. */
export interface ChatMessage {
  role: string;
  content: string;
  [field: string]: unknown;
}

/**
 * Renders conversations by a model's chat template (Jinja, as in Hugging Face's
 * `apply_chat_template` with `add_generation_prompt`). The template is parsed on first use: a
 * broken one affects only chat requests.
 */
function chatTemplate(
  source: string | undefined,
  specialTokens: Readonly<Record<string, string>>,
): (messages: readonly ChatMessage[]) => string {
  let template: Template | undefined;
  return (messages) => {
    if (source === undefined) {
      throw new KvError("KV_REQUEST_INVALID", "the model has no chat template", {
        hint: "use /v1/completions",
      });
    }
    try {
      template ??= new Template(source);
      return template.render({ ...specialTokens, messages, add_generation_prompt: true });
    } catch (error) {
      throw KvError.from(
        error,
        "KV_REQUEST_INVALID",
        "the model's chat template refused the messages",
      );
    }
  };
}
