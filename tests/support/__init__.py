"""What tests share: waiting, samples, fakes and real processes to test with."""
