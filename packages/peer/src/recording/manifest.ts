import { z } from "zod";

/** File names are made here: what a manifest names must not lead out of its folder. */
const fileName = z.string().regex(/^(frames|kv)\/[A-Za-z0-9._-]{1,100}$/);
const rankSchema = z.object({
  tpRank: z.int().min(0).max(65_535),
  request: fileName,
  reply: z.array(fileName).min(1).max(2),
});
const sideSchema = z.object({
  url: z.string().max(2048).optional(),
  vllmVersion: z.string().max(200).optional(),
  model: z.string().max(4096).optional(),
  ranks: z.array(rankSchema).min(1).max(4096),
});

const promptSchema = z.object({
  tokens: z.array(z.int().min(0)).min(1).max(4_000_000),
  params: z.record(z.string(), z.unknown()).describe("kv_transfer_params as the server answered them."),
  kv: z.object({ file: fileName, lengthBytes: z.int().min(0), sha256: z.string().regex(/^[0-9a-f]{64}$/) }),
  notification: z.string().max(1024).describe("What tells the server that its blocks were read."),
  made: z.array(z.int()).optional().describe("Tokens that the decode server made of this KV."),
});

/** `manifest.json` of a recording: what a pair of servers said, and the KV that went between them. */
export const manifestSchema = z.object({
  version: z.literal(1),
  tpSize: z.int().min(1).max(4096),
  prefill: sideSchema,
  decode: sideSchema.optional(),
  prompts: z.array(promptSchema).min(1).max(10_000),
});
export type Manifest = z.infer<typeof manifestSchema>;
export type RecordedSide = z.infer<typeof sideSchema>;
export type RecordedPrompt = z.infer<typeof promptSchema>;
