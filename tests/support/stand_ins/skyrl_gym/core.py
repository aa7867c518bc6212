class Env:
    def close(self):
        pass
