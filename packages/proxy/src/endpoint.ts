/** Where clients ask for text. Each is asked for under the same path at the instances. */
export type Endpoint = "/v1/completions" | "/v1/chat/completions" | "/v1/responses";
