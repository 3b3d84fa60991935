import { z } from "zod";

/** What the initiator of a benchmark asks of the target; see `target.ts`. */
export const requestSchema = z.discriminatedUnion("do", [
  z.strictObject({
    do: z.literal("open"),
    lengthBytes: z
      .int()
      .min(1)
      .max(2 ** 40),
    backend: z
      .string()
      .regex(/^[A-Za-z0-9_]{1,64}$/)
      .optional(),
  }),
  z.strictObject({
    do: z.literal("fill"),
    seed: z
      .int()
      .min(0)
      .max(2 ** 31),
  }),
  z.strictObject({ do: z.literal("digest"), lengthBytes: z.int().min(1) }),
]);
export type BenchRequest = z.infer<typeof requestSchema>;

const errorSchema = z.object({ code: z.string(), message: z.string(), hint: z.string().optional() });

export const openedSchema = z.object({
  /** `frameMetadata`, in base64. */
  metadata: z.base64(),
  address: z.number().int().positive(),
});
export const digestSchema = z.object({ sha256: z.string() });
export const doneSchema = z.object({ done: z.literal(true) });
export const replySchema = z.union([
  z.strictObject({ ok: z.unknown() }),
  z.strictObject({ error: errorSchema }),
]);
