def add_sglang_arguments(parser):
    parser.add_argument("--sglang-server-concurrency", type=int, default=512)
    return parser
