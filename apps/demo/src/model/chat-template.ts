import { Template } from "@huggingface/jinja";
import { KvError } from "@kv/interface";

/** A message of `/v1/chat/completions`; other fields reach the template as they are. */
export interface ChatMessage {
  role: string;
  content: string;
  [field: string]: unknown;
}

/**
 * Renders conversations by a model's chat template (Jinja, as in Hugging Face's `apply_chat_template` with
 * `add_generation_prompt`). The template is parsed on first use: a broken one hurts chat requests only.
 */
export function chatTemplate(
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
      throw KvError.from(error, "KV_REQUEST_INVALID", "the model's chat template refused the messages");
    }
  };
}
