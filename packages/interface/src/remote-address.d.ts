/**
 * What counts as one remote address: an IPv4 address, or the /64 network of an IPv6 address, which
 * one host may have as a whole.
 */
export declare function remoteAddressKey(address: string): string;
